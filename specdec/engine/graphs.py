"""Forwards recorded once per bucket of shapes and played again: a CUDA graph costs one launch instead of hundreds.

A bucket is (sequences, rows per sequence). Graphs are captured when a bucket is first met, over input buffers that stay
where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

log = logging.getLogger(__name__)

SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
ROW_BUCKETS = (1, 2, 4, 6, 8, 12, 16)
MOST_ROWS = 512
"""Of all sequences together: beyond, a forward is limited by arithmetic and launches cost little."""


@dataclass(frozen=True, slots=True)
class Bucket:
    sequences: int
    rows: int
    """Of each sequence, at most."""


def bucket_of(sequences: int, rows: int) -> Bucket | None:
    """The smallest that holds `sequences` of at most `rows` rows each; None if there is none."""
    fitting_sequences = next((size for size in SEQUENCE_BUCKETS if size >= sequences), None)
    fitting_rows = next((size for size in ROW_BUCKETS if size >= rows), None)
    if fitting_sequences is None or fitting_rows is None or fitting_sequences * fitting_rows > MOST_ROWS:
        return None
    return Bucket(fitting_sequences, fitting_rows)


@dataclass(frozen=True, slots=True)
class Recording:
    """replay: computes `output` anew from what lies in the input buffers."""

    replay: Callable[[], object]
    output: torch.Tensor


class Capture(Protocol):
    """The seam: records what `run` launches. `run` is called any number of times, and must not wait for the device."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> Recording: ...


class CudaCapture:
    """Real graphs. All share one memory pool, so an output must be copied before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Recording:
        with torch.cuda.device(self._device):
            return self._capture(run)

    def _capture(self, run: Callable[[], torch.Tensor]) -> Recording:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # libraries allocate and choose their kernels on the first calls
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on using the device.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = run()
        return Recording(graph.replay, output)
