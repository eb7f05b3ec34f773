"""Sharing the rows of a packed forward among the sequences of a batch, by marginal gain."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

_SHORTEST = 1e-6


def share(
    acceptances: Sequence[Sequence[float]], verify: Callable[[float], float], budget: int, wait: float = 0.0
) -> list[int]:
    """Draft lengths, one per sequence, that maximise expected committed tokens per second of the whole batch.

    acceptances: per sequence and depth, given that all depths above were accepted. verify: seconds by packed rows.
    budget: rows at most, one per sequence included. wait: seconds of a round besides verifying, if there is any
    candidate. The next candidate always goes where it is most likely to be accepted; how many there are in all is what
    gives the highest rate.
    """
    count = len(acceptances)
    chances = [(-rates[0], i, 0) for i, rates in enumerate(acceptances) if rates]
    heapq.heapify(chances)
    expected, rows = float(count), count
    best_rate, best_rows = expected / max(verify(rows), _SHORTEST), rows
    order: list[int] = []
    while chances and rows < budget:
        chance, i, depth = heapq.heappop(chances)
        expected, rows = expected - chance, rows + 1
        order.append(i)
        rate = expected / max(verify(rows) + wait, _SHORTEST)
        if rate > best_rate:
            best_rate, best_rows = rate, rows
        if depth + 1 < len(acceptances[i]):
            heapq.heappush(chances, (chance * acceptances[i][depth + 1], i, depth + 1))
    lengths = [0] * count
    for i in order[: best_rows - count]:
        lengths[i] += 1
    return lengths
