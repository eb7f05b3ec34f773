"""What `specdec.value` promises of the values that every round makes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import field, replace
from pathlib import Path

import pytest

from specdec.value import value

WRITES = """
from specdec.value import value

@value
class Point:
    x: int

Point(1).x = 2
"""


@value
class Point:
    x: int
    y: tuple[int, ...] = ()
    hint: float = field(default=0.0, compare=False)


def test_values_are_compared_and_hashed_by_their_fields() -> None:
    assert Point(1, (2,), 0.5) == Point(1, (2,)) != Point(1, (3,))
    assert len({Point(1), Point(1), Point(2)}) == 2
    assert replace(Point(1), x=2) == Point(2)


def test_a_value_takes_no_field_that_it_does_not_have() -> None:
    with pytest.raises(AttributeError):
        Point(1).z = 2  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_type_checker_holds_values_frozen(tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(tmp_path / "writes.py")]

    checked = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])

    assert checked.returncode == 1
    assert '"x" defined in "Point" is read-only' in checked.stdout
