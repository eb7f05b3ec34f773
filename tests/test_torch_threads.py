"""What torch's threads leave behind: nothing, where a model was loaded by a thread that passes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from services.torch_threads import in_passing_thread
from tools.waiting import until


def _compute() -> threading.Thread:
    rows = torch.ones(512, 512)
    assert float((rows @ rows).sum()) == 512.0**3
    assert float(rows.exp_().sum()) > 0  # a loop of torch's own threads
    return threading.current_thread()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_it_gives_what_was_computed_and_what_was_raised() -> None:
    thread = in_passing_thread(_compute)
    assert thread is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        in_passing_thread(lambda: 1 / 0)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
async def test_its_helpers_end_with_it() -> None:
    """Soon: a helper ends behind the thread that it helped."""
    in_passing_thread(_compute).join()
    before = _threads()
    for _ in range(4):
        in_passing_thread(_compute).join()
    await until(lambda: _threads() <= before, "no more threads than before", patience=5)
