"""The model of a fleet against the real system, over real sockets."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from bench.simulator.check import GOAL, Checked, check, table

DOCS = Path(__file__).parents[1] / "docs"
BUSY_PERCENT = 20


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_larger_batches_and_another_network_are_predicted_within_a_tenth() -> None:
    if psutil.cpu_percent(interval=2) > BUSY_PERCENT:
        pytest.skip("it compares with measured time: needs an otherwise idle machine")
    _, checked = await check()

    wanted = [one for one in checked if one.goal]
    assert len(wanted) == 3
    assert all(abs(one.error) < GOAL for one in wanted), table(checked)


def test_the_page_tells_the_errors_that_were_measured() -> None:
    checked = [Checked(**one) for one in json.loads((DOCS / "scale.json").read_text())["checked"]]

    assert table(checked) in (DOCS / "scale.md").read_text()
    assert all(abs(one.error) < GOAL for one in checked if one.goal)
