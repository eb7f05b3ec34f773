"""What a serving process runs on: uvloop, or asyncio's own loop where there is no uvloop."""

from __future__ import annotations

import asyncio
import gc
import importlib.util

import pytest
import uvloop

from services import event_loop, garbage


def _loop_of_a_run() -> asyncio.AbstractEventLoop:
    loops: list[asyncio.AbstractEventLoop] = []

    async def look() -> None:
        loops.append(asyncio.get_running_loop())

    event_loop.run(look())
    return loops[0]


def test_a_process_runs_on_uvloop_and_without_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(_loop_of_a_run(), uvloop.Loop)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(_loop_of_a_run(), asyncio.SelectorEventLoop)


def test_after_the_start_cycles_are_still_found_and_looked_for_more_seldom() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(700, *thresholds[1:])  # another test may have served in this process
    try:
        garbage.start_is_over()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > 700
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
