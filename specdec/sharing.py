"""Sharing the rows of a packed forward among the sequences of a batch, by marginal gain."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SHORTEST = 1e-6
_NEARLY, _HOPELESS = 0.995, 0.8


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence of the batch. acceptance: by depth, given that all depths above were accepted. proposes: chance that
    its drafter has any candidate when it is asked."""

    acceptance: tuple[float, ...]
    proposes: float = 1.0


@dataclass(frozen=True, slots=True)
class Shares:
    """Draft lengths, one per sequence. seconds: of a round with them. gain: the share by which they raise the rate of
    the batch over plain decoding."""

    lengths: tuple[int, ...]
    seconds: float
    gain: float


def _no_wait(longest: int, sequences: int) -> float:
    return 0.0


def share(
    members: Sequence[Member],
    verify: Callable[[float], float],
    budget: int,
    wait: Callable[[int, int], float] = _no_wait,
    stretch: float = 0.0,
) -> Shares:
    """What maximises expected committed tokens per second of the whole batch, if its sequences wait for each other.

    verify: seconds by packed rows. budget: rows at most, one per sequence included. wait: seconds of a round besides
    verifying, by the longest draft and the number of sequences that draft. stretch: the share by which such rounds are
    seen to take longer. The next candidate always goes where it is most likely to be accepted; how many there are in
    all is what gives the highest rate, or very nearly: what more rows cost is known best of few.
    """
    count = len(members)
    chances = [(-member.acceptance[0], i, 0) for i, member in enumerate(members) if member.acceptance]
    heapq.heapify(chances)
    expected, rows = float(count), float(count)
    seconds = max(verify(rows), _SHORTEST)
    plain_rate, best = expected / seconds, 0.0
    longest, drafting, waiting, stretched = 0, 0, 0.0, 1 + stretch
    order: list[int] = []
    found: list[tuple[float, float]] = []
    while chances and count + len(order) < budget:
        chance, i, depth = chances[0]
        acceptance, proposes = members[i].acceptance, members[i].proposes
        expected, rows = expected - chance * proposes, rows + proposes
        order.append(i)
        if depth == 0 or depth == longest:  # else what is waited for stays as it is
            longest, drafting = max(longest, depth + 1), drafting + (depth == 0)
            waiting = wait(longest, drafting)
        taken = max(verify(rows) + waiting, _SHORTEST)
        rate = expected / (taken * stretched)
        found.append((rate, taken))
        if rate > best:
            best = rate
        elif rate < _HOPELESS * best:
            break
        if depth + 1 < len(acceptance):
            heapq.heapreplace(chances, (chance * acceptance[depth + 1], i, depth + 1))
        else:
            heapq.heappop(chances)
    lengths = [0] * count
    if best <= plain_rate:
        return Shares(tuple(lengths), seconds, 0.0)
    enough = next(i for i, (rate, _) in enumerate(found) if rate >= max(best * _NEARLY, plain_rate))
    for i in order[: enough + 1]:
        lengths[i] += 1
    return Shares(tuple(lengths), found[enough][1], found[enough][0] / plain_rate - 1)
