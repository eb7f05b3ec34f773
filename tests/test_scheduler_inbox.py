"""What comes to one sequence: in order, within limits that move, and with hardly a timer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from scheduler.config import Policy
from scheduler.driver import Driver
from scheduler.errors import Unavailable
from scheduler.inbox import Inbox
from scheduler.request import Event, Finished, GenerationRequest, Speculation, Tokens
from scheduler.worker import AnyItem, AnyResult, Worker
from specdec.messages import Committed, DraftAdvance, Epoch, Header, Opened, Role, TargetResult
from specdec.params import SamplingParams
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.network import Network
from tools.scripted import ScriptedDrafter, oracle
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw()


def _worker() -> Worker:
    return Worker(Role.TARGET, "target-0", Network().make_link(Role.TARGET, "target-0"))


def _result(length: int) -> TargetResult:
    return TargetResult(Header("s", Epoch(1, "a"), length, b""), Opened())


async def test_messages_come_in_order_and_an_error_behind_them() -> None:
    inbox, worker = Inbox(), _worker()
    inbox.deliver(worker, _result(1))
    inbox.lost(worker)
    inbox.end(Unavailable("it is over"))
    assert await inbox.next(lambda: math.inf) == (worker, _result(1))
    assert await inbox.next(lambda: 0.0) == (worker, None)
    with pytest.raises(Unavailable, match="over"):
        await inbox.next(lambda: 0.0)


async def test_a_limit_that_comes_nearer_ends_the_wait() -> None:
    inbox, limit = Inbox(), time.monotonic() + 3600.0
    reader = asyncio.ensure_future(inbox.next(lambda: limit))
    await asyncio.sleep(0)
    assert inbox.idle
    limit = time.monotonic()
    inbox.ring_by(limit)
    async with asyncio.timeout(5.0):
        assert await reader is None
    assert not inbox.idle


async def test_an_event_is_written_before_what_is_asked_for_behind_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link sends in a task of its own, a turn of the event loop later."""
    order: list[str] = []
    send = Worker.send

    def sent_later(worker: Worker, item: AnyItem) -> None:
        if isinstance(item.body, DraftAdvance):
            asyncio.get_running_loop().call_soon(order.append, "asked")
        send(worker, item)

    monkeypatch.setattr(Worker, "send", sent_later)
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))], quick_config()) as system:
        request = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.0), max_tokens=50)
        async for event in system.scheduler.generate(request):
            if isinstance(event, Tokens):
                order.append("event")
    assert order == ["event", "asked"] * 9 + ["event"]


async def test_limits_that_lie_ever_later_cost_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), 0
    call_later = loop.call_later

    def counted(*arguments: object) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_later(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_later", counted)
    inbox, worker = Inbox(), _worker()
    for length in range(50):
        loop.call_soon(inbox.deliver, worker, _result(length))
        limit = time.monotonic() + 3600.0
        assert await inbox.next(lambda limit=limit: limit) == (worker, _result(length))  # type: ignore[misc]
    inbox.close()
    assert timers == 1


async def test_a_sequence_waits_for_a_slow_client_and_loses_nothing() -> None:
    request = GenerationRequest((1, 2, 3), max_tokens=200, sampling=SamplingParams(temperature=0.0))
    config = quick_config(policy=Policy.FIXED, draft_length=4)
    drafter = ScriptedDrafter(oracle, LawContinuation(LAW))
    async with Deployment([TableModel(LAW)], [drafter], config) as deployment:
        reference = await deployment.plain(request)
        events = deployment.scheduler.generate(request)
        seen = [await anext(events), await anext(events)]
        await deployment.generate(replace(request, token_ids=(4, 5, 6)))  # has all the time it needs, and more
        (slow,) = deployment.scheduler.sequences()
        assert 3 + 5 < slow.committed_length <= 3 + 5 * 5  # it went on beside a client that looks away, but not far
        seen += [event async for event in events]
    told = [event for event in seen if isinstance(event, Tokens)]
    assert [event.position for event in told] == list(accumulate([0, *(len(event.token_ids) for event in told[:-1])]))
    assert [token_id for event in told for token_id in event.token_ids] == list(reference.token_ids)
    assert isinstance(seen[-1], Finished)


async def test_what_comes_behind_the_end_changes_nothing() -> None:
    """The target goes on by itself until it hears that the text has ended."""

    class Ends:
        def ends_after(self, token_ids: Sequence[int]) -> int | None:
            return 1

    held: list[TargetResult] = []

    def together(results: list[TargetResult]) -> list[TargetResult]:
        """Verdicts three at a time, the rest as it comes."""
        held.extend(result for result in results if isinstance(result.body, Committed))
        others = [result for result in results if not isinstance(result.body, Committed)]
        if len(held) < 3:
            return others
        arrived = [*others, *held]
        held.clear()
        return arrived

    request = GenerationRequest((1, 2, 3), max_tokens=60, watcher=Ends(), speculation=Speculation.OFF)
    async with Deployment([TableModel(LAW, delay=0.01)]) as deployment:
        deployment.targets[0].meddle = together
        answer = await deployment.generate(request)
    assert answer.finished is not None
    assert (len(answer.token_ids), answer.finished.completion_tokens) == (1, 1)


async def test_a_fault_in_a_verdict_comes_behind_what_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    handled, request = Driver._continue, GenerationRequest((1, 2, 3), max_tokens=60)
    told: list[Event] = []

    def fails(driver: Driver, now: float) -> None:
        if len(driver.log) > 20:
            raise ArithmeticError("a fault of this sequence")
        handled(driver, now)

    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))]) as deployment:
        monkeypatch.setattr(Driver, "_continue", fails)
        with pytest.raises(ArithmeticError):
            async for event in deployment.scheduler.generate(request):
                told.append(event)
    assert 3 + sum(len(event.token_ids) for event in told if isinstance(event, Tokens)) > 20


async def test_a_fault_in_a_block_ends_its_sequence_and_not_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    handled, request = Driver._on_draft, GenerationRequest((1, 2, 3), max_tokens=20)

    def fails(driver: Driver, worker: Worker, result: AnyResult) -> None:
        raise ArithmeticError("a fault of this sequence")

    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))]) as deployment:
        monkeypatch.setattr(Driver, "_on_draft", fails)
        with pytest.raises(ArithmeticError):
            await deployment.generate(request)
        monkeypatch.setattr(Driver, "_on_draft", handled)
        answer = await deployment.generate(request)
        assert answer.finished is not None
        assert answer.finished.speculation.num_drafts > 0
