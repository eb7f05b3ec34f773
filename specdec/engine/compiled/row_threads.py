"""Dividing the rows of one kernel among threads, where there is enough to do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SMALLEST_SHARE = 150_000
"""Nanoseconds of work for which a thread is woken: that takes a third of it."""


class RowThreads:
    """As many threads as torch computes with. Called from one thread only."""

    def __init__(self) -> None:
        self._helpers: ThreadPoolExecutor | None = None

    def run(self, work: NDArray[Any], kernel: Callable[..., None], *arguments: Any) -> None:
        """Calls `kernel(*arguments, start, end)` for all rows, divided so that each thread has about as much `work`.

        work: nanoseconds up to the end of each row, [rows].
        """
        total = work[-1]
        threads = min(torch.get_num_threads(), max(int(total // SMALLEST_SHARE), 1))
        if threads == 1:
            kernel(*arguments, 0, len(work))
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(torch.get_num_threads() - 1, "rows")
        inner = np.searchsorted(work, total / threads * np.arange(1, threads)).tolist()
        bounds = [0, *inner, len(work)]
        others = [self._helpers.submit(kernel, *arguments, start, end) for start, end in pairwise(bounds[1:])]
        kernel(*arguments, 0, bounds[1])
        for other in others:
            other.result()
