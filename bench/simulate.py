"""What a fleet would do, by a model of its queues with measured costs (docs/scale.md).

python -m bench.simulate check     measures a small real system, calibrates on it, and tells how well it predicts
python -m bench.simulate fleet     runs a fleet of yours
python -m bench.simulate scale     writes docs/scale.md anew from the costs of the last check
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from bench.journal import ROOT
from bench.simulator import page
from bench.simulator.costs import Costs
from bench.simulator.fleet import FleetConfig
from bench.simulator.simulation import Outcome, arriving, read_trace, steady

CHECKED = ROOT / "docs" / "scale.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.simulate", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="measure, calibrate, predict; one minute")
    check.set_defaults(run=_check)
    check.add_argument("--out", type=Path, default=CHECKED, help="file for costs and errors (docs/scale.json)")
    scale = commands.add_parser("scale", help="write docs/scale.md")
    scale.set_defaults(run=_scale)
    _add_fleet(commands.add_parser("fleet", help="run a fleet of yours"))
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_fleet)
    parser.add_argument("--costs", type=Path, default=CHECKED, help="what things cost, in the form of docs/scale.json")
    for name, what in (("targets", "target workers"), ("drafters", "draft workers"), ("schedulers", "schedulers")):
        parser.add_argument(f"--{name}", type=_count, default=1, help=f"number of {what} (1)")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of the network, one way (1)")
    parser.add_argument("--draft-length", type=int, default=4, help="candidates of a block; 0: plain (4)")
    parser.add_argument("--window", type=_count, default=1, help="blocks of a sequence in flight (1)")
    parser.add_argument("--users", type=_count, default=16, help="at a time, in all (16)")
    parser.add_argument("--tokens", type=_count, default=200, help="of an answer, on average (200)")
    parser.add_argument("--prompt", type=_count, default=200, help="tokens of a prompt (200)")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are looked at, behind 5 of warming up (10)")
    parser.add_argument("--trace", type=Path, help="JSON lines with at, prompt, tokens: these arrive instead of users")
    parser.add_argument("--seed", type=int, default=0)


def _check(options: argparse.Namespace) -> int:
    from bench.simulator import redis_load
    from bench.simulator.check import GOAL, check, table

    costs, checked = asyncio.run(check())
    redis = asyncio.run(redis_load.measure())
    values = {"costs": costs.as_dict(), "redis": asdict(redis), "checked": [asdict(one) for one in checked]}
    options.out.write_text(json.dumps(values, indent=1) + "\n")
    print(table(checked))
    return int(any(one.goal and abs(one.error) > GOAL for one in checked))


def _scale(options: argparse.Namespace) -> int:
    page.write(ROOT / "docs" / "scale.md", json.loads(CHECKED.read_text()))
    return 0


def _fleet(options: argparse.Namespace) -> int:
    costs = Costs.from_dict(json.loads(options.costs.read_text())["costs"])
    config = FleetConfig(
        options.targets,
        options.drafters,
        options.schedulers,
        options.delay_ms / 1e3,
        options.draft_length,
        options.window,
    )
    if options.trace:
        outcome = arriving(config, costs, read_trace(options.trace), seed=options.seed)
    else:
        outcome = steady(
            config, costs, options.users, options.tokens, options.prompt, 5.0, options.seconds, options.seed
        )
    print(json.dumps(_shown(outcome), indent=1))
    return 0


def _shown(outcome: Outcome) -> dict[str, Any]:
    values = {name: round(value, 4) for name, value in asdict(outcome).items() if name != "waits"}
    return values | {"first_token_p50": round(outcome.wait(0.5), 4), "first_token_p99": round(outcome.wait(0.99), 4)}


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
