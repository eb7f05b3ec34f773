"""The same kinds over real sockets, with worker processes that are killed, stopped, and that lie."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

from scheduler.request import GenerationRequest, Tokens
from tools.cases import SAMPLED, check_all, expected, prompts, total
from tools.deployment import quick_config
from tools.history import History
from tools.socket_deployment import SocketDeployment
from tools.table_law import TableLaw
from tools.waiting import until

LAW = TableLaw(order=1000)
TARGET = "table_target --order 1000"
SCRIPTED = "scripted_draft --order 1000"


def requests(count: int, tokens: int = 40) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, SAMPLED, max_tokens=tokens) for prompt in prompts(count)]


async def everywhere_idle(system: SocketDeployment) -> bool:
    loads = [view.load for view in await system.scheduler.workers() if view.load]
    return not any(load.sequences or load.kv_blocks_used for load in loads)


async def test_kinds_2_4_12_and_19_over_the_wire() -> None:
    """Right, half right, lying and broken draft workers side by side, and clients that hang up: whoever a sequence
    gets, the text is the target's, and nothing is left behind."""
    scripts = [
        "--script half:2 --meddle old_epoch",
        "--script tree:3 --meddle late_duplicates",
        "--script spoiled:-1 --meddle wrong_digest",
    ]
    async with SocketDeployment([TARGET], [f"{SCRIPTED} {script}" for script in scripts]) as system:
        stops = frozenset(expected(LAW, requests(1)[0]).token_ids[7:9])
        cases = [*requests(16), *(replace(r, stop_token_ids=stops, draft_length=8) for r in requests(8))]
        figures = total(await check_all(system, LAW, cases))

        async def hang_up(request: GenerationRequest, tokens: int) -> None:
            async with aclosing(system.scheduler.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Tokens) and event.position >= tokens:
                        return

        await asyncio.gather(*(hang_up(r, i) for i, r in enumerate(requests(30, 100))))
        await until(lambda: everywhere_idle(system), "nothing is left on any worker")
        loads = [view.load for view in await system.scheduler.workers() if view.load]
    assert figures.num_drafts > 0
    assert figures.fallbacks.get("failed", 0) > 0
    assert figures.num_failovers == 0
    assert all(load.steps > 0 for load in loads)


async def test_targets_lost_half_way_lose_and_repeat_nothing() -> None:
    """One is frozen, which its round deadline or pings notice, and what it says when it wakes is late. Then the one
    that took over is killed. However fast all else is, its own answers need a second of verifies: they still run when
    those of the first have come over."""
    history = History()
    config = replace(quick_config(), round_timeout=0.5)
    async with SocketDeployment([f"{TARGET} --delay 0.03"] * 2, [SCRIPTED], config) as system:
        cases = requests(6, 450)
        for i, request in enumerate(cases):
            history.expect(str(i), expected(LAW, request).token_ids)
        running = [
            asyncio.create_task(system.generate(request, history.request(str(i)))) for i, request in enumerate(cases)
        ]

        def lengths() -> list[int]:
            return [len(history.requests[str(i)].token_ids) for i in range(len(cases))]

        await until(lambda: min(lengths()) > 20, "all run")
        system.targets[0].freeze()
        frozen_at = lengths()
        in_flight = 30
        await until(
            lambda: all(now > then + in_flight for now, then in zip(lengths(), frozen_at, strict=True)),
            "all run on the other target",
        )
        assert not any(task.done() for task in running)
        system.targets[0].thaw()
        await system.targets[1].kill()
        answers = await asyncio.gather(*running)
        await until(lambda: everywhere_idle(system), "nothing is left")
    assert history.violations() == []
    assert all(a.finished and a.finished.speculation.num_failovers >= 1 for a in answers)
    assert total(answers).num_failovers >= 9


async def test_a_killed_draft_worker_and_a_bad_network_change_no_token() -> None:
    config = replace(quick_config(), round_timeout=1.0)
    async with SocketDeployment(
        [f"{TARGET} --delay 0.01"], [f"{SCRIPTED} --script half:3"], config, proxied=True
    ) as system:
        history = History()
        cases = requests(8, 450)
        running = [asyncio.create_task(system.generate(r, history.request(str(i)))) for i, r in enumerate(cases)]
        await until(lambda: all(len(r.token_ids) > 20 for r in history.requests.values()), "all run")
        for proxy in (*system.proxies, *system.proxies):
            await proxy.reset()
            await until(lambda: system.settled(), "it is found again")
        assert not any(task.done() for task in running)
        await system.drafts[0].kill()
        answers = await asyncio.gather(*running)
        await system.drafts[0].start()
        await until(lambda: system.settled(), "the new draft worker is found")
        again = total(await check_all(system, LAW, requests(4)))
        await until(lambda: everywhere_idle(system), "nothing is left")
    for request, answer in zip(cases, answers, strict=True):
        assert tuple(answer.token_ids) == expected(LAW, request).token_ids
        assert answer.finished is not None
        assert answer.finished.speculation.mode == "mixed"
        assert answer.finished.speculation.num_failovers >= 1
    assert again.num_drafts > 0
