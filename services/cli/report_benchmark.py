"""A benchmark result as the report draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MARGIN = 0.08
"""Free space at both ends of a chart, as a share of what it shows."""


class InvalidResult(ValueError):
    """A field is missing or of another kind."""


@dataclass(frozen=True, slots=True)
class Figure:
    """low, high: its interval. place_*: where they lie on the common axis of the result, 0 to 100."""

    name: str
    median: float
    low: float
    high: float
    count: int
    goal: str
    place: float
    place_low: float
    place_high: float


@dataclass(frozen=True, slots=True)
class Benchmark:
    title: str
    command: str
    notes: str
    machine: tuple[tuple[str, str], ...]
    figures: tuple[Figure, ...]

    @classmethod
    def of(cls, content: Any) -> Benchmark:
        """Raises InvalidResult."""
        try:
            ratios: Mapping[str, Any] = content["ratios"]
            ends = [float(value[end]) for value in ratios.values() for end in ("low", "high")]
            least, most = min([0.0, *ends]), max([1.0, *ends])
            span = (most - least) * (1 + MARGIN)
            return cls(
                str(content["title"]),
                str(content["command"]),
                str(content.get("notes", "")),
                tuple((str(name), str(value)) for name, value in content["machine"].items()),
                tuple(_figure(name, value, least, span) for name, value in ratios.items()),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidResult(f"{type(error).__name__} {error}") from error


def _figure(name: str, value: Mapping[str, Any], least: float, span: float) -> Figure:
    median, low, high = (float(value[key]) for key in ("median", "low", "high"))
    places = [100 * (x - least) / span for x in (median, low, high)]
    return Figure(name, median, low, high, int(value["count"]), str(value.get("goal", "")), *places)
