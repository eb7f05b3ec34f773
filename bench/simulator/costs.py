"""What things cost in a fleet, as measured. Times are in seconds. A *row* is one token of a packed forward."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight lines through knots (x, seconds) of growing x; the last line goes on, the first value holds below."""

    knots: tuple[tuple[float, float], ...]

    def __call__(self, x: float) -> float:
        if len(self.knots) == 1 or x <= self.knots[0][0]:
            return self.knots[0][1]
        i = min(bisect.bisect_left(self.knots, (x,)), len(self.knots) - 1)
        (x0, y0), (x1, y1) = self.knots[i - 1], self.knots[i]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    @staticmethod
    def line(base: float, slope: float) -> Curve:
        return Curve(((0.0, base), (1.0, base + slope)))


@dataclass(frozen=True, slots=True)
class Costs:
    """verify: of a target's step by its rows, drawing and accepting included. draft: of one candidate of each sequence
    by the sequences drafted together. hop: of a message from one process to another, besides the network and besides
    what occupies either. worker_item: what one item of a message occupies a worker for; scheduler_message,
    scheduler_item: what a message, and each of its items, occupies the scheduler for. acceptance: chance by depth that
    a candidate is accepted if all above it were; the last goes on.
    """

    verify: Curve
    draft: Curve
    hop: float
    worker_item: float
    scheduler_message: float
    scheduler_item: float
    acceptance: tuple[float, ...]

    def accepts(self, depth: int) -> float:
        return self.acceptance[min(depth, len(self.acceptance) - 1)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Costs:
        verify, draft = (Curve(tuple((x, y) for x, y in values[name]["knots"])) for name in ("verify", "draft"))
        return Costs(
            verify,
            draft,
            float(values["hop"]),
            float(values["worker_item"]),
            float(values["scheduler_message"]),
            float(values["scheduler_item"]),
            tuple(values["acceptance"]),
        )
