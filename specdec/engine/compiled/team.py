"""Threads that compute one kernel together: what is free is claimed, and all wait for each other between its phases.

A thread that loses its core for a while delays the others only by the piece that it holds.

A team's counters are one int64 array of zeros: arrivals first, then the pieces claimed of each phase.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec.engine.compiled.compiling import inlined
from specdec.engine.compiled.kernels import Ints
from specdec.engine.compiled.shared_counters import fetch_add, load_shared, pause, yield_core

SPINS = 2_000
"""Looks at the others' progress before the core is offered to somebody else: about 30 microseconds."""


class Crew(NamedTuple):
    """What one of the threads knows."""

    counters: Ints  # [1 + phases], shared
    phase: Ints  # [1], its own: the number of the phase, from 1 on
    threads: int


@inlined
def claim(crew: Crew) -> int:
    """The next piece of the phase, from 0 on; whoever is told one beyond the last has to go on."""
    piece: int = fetch_add(crew.counters.ctypes.data + 8 * crew.phase[0], 1)
    return piece


@inlined
def meet(crew: Crew) -> None:
    """Ends the phase: waits until all threads have come."""
    address = crew.counters.ctypes.data
    fetch_add(address, 1)
    looks = 0
    while load_shared(address) < crew.threads * crew.phase[0]:
        pause()
        looks += 1
        if looks > SPINS:
            yield_core()
    crew.phase[0] += 1


class Team:
    """As many threads as torch computes with. Called from one thread only."""

    def __init__(self) -> None:
        self._helpers: ThreadPoolExecutor | None = None
        self._size = 1

    def run(self, phases: int, kernel: Callable[..., None], *arguments: Any, alone: bool = False) -> None:
        """Calls `kernel(*arguments, counters, threads)` in every thread, or only in this one."""
        threads = 1 if alone else torch.get_num_threads()
        counters = np.zeros(1 + phases, np.int64)
        if threads == 1:
            kernel(*arguments, counters, 1)
            return
        if self._helpers is None or threads > self._size:  # all must run at once, since each waits for every other
            self._helpers, self._size = ThreadPoolExecutor(threads - 1, "team"), threads
        others = [self._helpers.submit(kernel, *arguments, counters, threads) for _ in range(threads - 1)]
        kernel(*arguments, counters, threads)
        for other in others:
            other.result()
