"""Ctrl-C ends a command whenever it comes."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from services.cli import interruptible
from tools.waiting import PATIENCE


@pytest.fixture
def other_thread() -> Iterator[threading.Thread]:
    """One that only waits."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(PATIENCE,))
    thread.start()
    yield thread
    ended.set()
    thread.join()


def test_a_signal_that_interrupts_no_wait_ends_the_work(other_thread: threading.Thread) -> None:
    """Such as one that another thread gets; one that comes just before the wait is like it, and cannot be timed."""
    cancelled = []

    async def hanging() -> None:
        sent = threading.Timer(0.2, signal.pthread_kill, (other_thread.ident, signal.SIGINT))
        sent.start()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        finally:
            sent.join()

    with pytest.raises(KeyboardInterrupt):
        interruptible.run(hanging())
    assert cancelled == [True]


def test_it_gives_what_the_work_gives_and_leaves_signals_as_they_were() -> None:
    async def answer() -> int:
        return 7

    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    assert interruptible.run(answer()) == 7
    assert signal.set_wakeup_fd(before) == before


async def test_in_another_thread_it_leaves_signals_alone() -> None:
    async def answer() -> int:
        return 7

    assert await asyncio.to_thread(lambda: interruptible.run(answer())) == 7
