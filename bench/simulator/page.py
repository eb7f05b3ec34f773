"""docs/scale.md: what the model says of fleets, and how well it was held against a real system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.simulator import sizing
from bench.simulator.check import GOAL, Checked, table
from bench.simulator.costs import Costs
from bench.simulator.redis_load import RedisCosts

_TEMPLATE = Path(__file__).with_name("scale.md.in")


def write(path: Path, values: Mapping[str, Any]) -> None:
    """values: scale.json."""
    costs, redis = Costs.from_dict(values["costs"]), RedisCosts(**values["redis"])
    checked = [Checked(**one) for one in values["checked"]]
    targets, _, one = sizing.cell(costs)
    row = costs.verify(101) - costs.verify(100)
    text = _TEMPLATE.read_text().format(
        costs=_costs(costs),
        timing=(
            f"{costs.verify(0) * 1e3:.1f} ms for a forward and {row * 1e3:.2f} ms for each row, "
            f"{costs.draft(0) * 1e3:.1f} ms for a candidate and {(costs.draft(2) - costs.draft(1)) * 1e3:.2f} ms for "
            "each sequence."
        ),
        checked=table(checked),
        goal=f"{GOAL:.0%}",
        users=sizing.USERS,
        tokens=sizing.TOKENS,
        prompt=sizing.PROMPT,
        windows=sizing.windows(costs),
        row=f"{row * 1e3:.2f}",
        by_users=sizing.users(costs),
        drafters=sizing.drafters(costs),
        schedulers=sizing.schedulers(costs),
        item=f"{costs.scheduler_item * 1e3:.2f}",
        message=f"{costs.scheduler_message * 1e3:.2f}",
        fleets=sizing.fleets(costs, redis),
        busy=f"{sizing.BUSY:.0%}",
        enough=f"{sizing.ENOUGH:.0%}",
        record=f"{redis.record * 1e6:.0f}",
        renew=f"{redis.renew * 1e6:.0f}",
        read=f"{redis.read * 1e6:.1f}",
        per_scheduler=targets + 1,
        per_redis=sizing.redis_limit(costs, redis),
        bytes=sizing.ROUND_BYTES,
        rate=f"{one.goodput / targets:.0f}",
    )
    path.write_text(text)


def _costs(costs: Costs) -> str:
    rows = [
        [
            "target: a step of 5 / 20 / 80 rows",
            " / ".join(f"{costs.verify(rows) * 1e3:.1f} ms" for rows in (5, 20, 80)),
        ],
        [
            "drafter: a candidate of 1 / 4 / 16 sequences",
            " / ".join(f"{costs.draft(n) * 1e3:.1f} ms" for n in (1, 4, 16)),
        ],
        ["worker: an item", f"{costs.worker_item * 1e3:.2f} ms"],
        [
            "scheduler: a message, and each item in it",
            f"{costs.scheduler_message * 1e3:.2f} ms, {costs.scheduler_item * 1e3:.2f} ms",
        ],
        ["a message on its way, besides the network", f"{costs.hop * 1e3:.2f} ms"],
        ["acceptance by depth", ", ".join(f"{rate:.2f}" for rate in costs.acceptance)],
    ]
    return sizing.table(["what", "cost"], rows)
