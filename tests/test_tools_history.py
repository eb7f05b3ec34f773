"""The history checker catches each violation that is planted, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from scheduler.errors import Unavailable
from scheduler.request import Event, Finished, SpeculationSummary, Started, Tokens
from specdec.commit import FinishReason, TokenSource
from tools.history import History, RequestHistory, Terminal

REFERENCE = [4, 8, 15, 16, 23, 42]


def good(history: History) -> RequestHistory:
    history.expect("r", REFERENCE)
    request = history.request("r")
    request.deliver(0, REFERENCE[:2])
    request.deliver(2, REFERENCE[2:])
    request.end(Terminal.FINISHED, usage=len(REFERENCE))
    return request


def test_a_good_history_has_no_violations() -> None:
    history = History()
    good(history)
    assert history.violations() == []


def test_a_cancelled_request_may_end_within_its_reference() -> None:
    history = History()
    history.expect("r", REFERENCE)
    history.request("r").deliver(0, REFERENCE[:3])
    history.request("r").end(Terminal.CANCELLED)
    assert history.violations() == []


def repeat(request: RequestHistory) -> None:
    request.events.insert(2, request.events[1])


def gap(request: RequestHistory) -> None:
    del request.events[2]


def swapped(request: RequestHistory) -> None:
    request.events[1], request.events[2] = request.events[2], request.events[1]


def wrong_token(request: RequestHistory) -> None:
    other = RequestHistory("other")
    other.deliver(5, [7], at=request.events[5].at)
    request.events[5] = other.events[0]


def no_end(request: RequestHistory) -> None:
    del request.events[-1]


def two_ends(request: RequestHistory) -> None:
    request.events.append(request.events[-1])


def token_behind_the_end(request: RequestHistory) -> None:
    request.events.append(request.events.pop(-2))


def wrong_usage(request: RequestHistory) -> None:
    del request.events[-1]
    request.end(Terminal.FINISHED, usage=len(REFERENCE) + 1)


def too_short(request: RequestHistory) -> None:
    del request.events[-2:]
    request.end(Terminal.FINISHED, usage=len(REFERENCE) - 1)


def too_long(request: RequestHistory) -> None:
    del request.events[-1]
    request.deliver(len(REFERENCE), [1])
    request.end(Terminal.FINISHED, usage=len(REFERENCE) + 1)


def clock_runs_back(request: RequestHistory) -> None:
    del request.events[-1]
    request.end(Terminal.FINISHED, usage=len(REFERENCE), at=0.0)


@pytest.mark.parametrize(
    ("plant", "finding"),
    [
        (repeat, "position 1 repeated"),
        (gap, "gap: position 3 came where 2 was due"),
        (swapped, "gap: position 2"),
        (wrong_token, "token 7 at position 5, the reference has 42"),
        (no_end, "0 terminal events"),
        (two_ends, "2 terminal events"),
        (token_behind_the_end, "tokens behind the terminal event"),
        (wrong_usage, "usage 7 but 6 delivered"),
        (too_short, "finished with 5 tokens, the reference has 6"),
        (too_long, "7 tokens, the reference has 6"),
        (clock_runs_back, "times run backwards"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_each_planted_violation_is_found(plant: Callable[[RequestHistory], None], finding: str) -> None:
    history = History()
    plant(good(history))
    assert any(finding in line for line in history.violations()), history.violations()


def test_a_request_that_left_no_history_is_found() -> None:
    history = History()
    history.expect("r", REFERENCE)
    assert history.violations() == ["r: no history"]


async def test_a_stream_is_written_down_with_its_terminal_event() -> None:
    async def events(fail: bool) -> AsyncIterator[Event]:
        yield Started("s", "table", 0, 1)
        yield Tokens(0, (4, 8), (TokenSource.PLAIN, TokenSource.PLAIN), b"")
        if fail:
            raise Unavailable("no target")
        yield Finished(FinishReason.LENGTH, 1, 2, SpeculationSummary(), 0.1, 0.1)

    history = History()
    await history.record("ends", events(fail=False))
    await history.record("fails", events(fail=True))
    assert history.request("ends").token_ids == [4, 8]
    assert [end.terminal for end in history.request("ends").ends] == [Terminal.FINISHED]
    assert [end.terminal for end in history.request("fails").ends] == [Terminal.ERROR]
    assert history.violations() == []
