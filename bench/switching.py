"""How the goodput policy follows a drafter whose acceptance falls from 0.9 to 0.05 and rises again.

Table models in this process: a forward takes 10 ms and 0.3 ms for each row, a candidate 1 ms. One sequence; a step is
one forward of its target, with candidates or without. The draft length is the median of the last five steps.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.journal import ROOT
from bench.plots import Lines
from bench.ratios import Goal, Ratio, ratio
from bench.session import Result, Session
from bench.timed_models import LAW, TimedDrafter, TimedModel

sys.path.insert(0, str(ROOT / "tests"))

from scheduler.config import Policy
from scheduler.request import GenerationRequest
from specdec.candidates import CandidateTree
from specdec.drafter import Abandoned, DraftJob, never
from specdec.messages import Committed
from specdec.params import SamplingParams
from tools.deployment import Deployment, quick_config
from tools.table_drafter import TableDrafter

PHASES = (0.9, 0.05, 0.9)
SMOOTHED = 5
OFF_GOAL = Goal(10, at_most=True, unit="steps")
BACK_GOAL = Goal(50, at_most=True, unit="steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=6, help="answers, each through all three phases")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each phase")
    parser.add_argument("--policy", choices=("goodput", "threshold"), default="goodput")


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    ratios: dict[str, Ratio] = {
        "switching.steps_until_off": ratio([_until_off(row, options.tokens) for row in rows], OFF_GOAL),
        "switching.steps_until_back": ratio([_until_back(row, options.tokens) for row in rows], BACK_GOAL),
        "switching.former_length": ratio([_former_length(row, options.tokens) for row in rows]),
    }
    first = rows[0]["steps"]
    chart = Lines(
        "switching",
        f"Draft length while acceptance goes {' -> '.join(f'{phase:g}' for phase in PHASES)}",
        "steps of the target",
        "candidates",
        {"smoothed": list(enumerate(_smoothed([length for _, length in first])))},
    )
    notes = (
        f"{len(rows)} answers, policy {options.policy}. `until_off`: steps behind the fall until the smoothed length "
        "is 0; `until_back`: steps behind the rise until it is 80 % of what it was before the fall. "
        f"{session.stopped_early}"
    )
    return Result("When acceptance falls and rises", ratios, notes.rstrip(), (chart,))


@dataclass(slots=True)
class _Switching:
    """Implements `Drafter`: drafts as the phase that the log is in says."""

    drafters: Sequence[TableDrafter]
    tokens: int
    name: str = "switching"
    context_length: int = 0

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        return [self._of(job).draft([job])[0] for job in jobs]

    def release(self, sequence_id: str) -> None:
        """Holds nothing per sequence."""

    def _of(self, job: DraftJob) -> TableDrafter:
        phase = (len(job.log) - job.stop.prompt_length) // self.tokens
        return self.drafters[min(phase, len(self.drafters) - 1)]


async def _measure(options: argparse.Namespace, session: Session) -> None:
    inner = _Switching([TableDrafter(LAW, acceptance) for acceptance in PHASES], options.tokens)
    drafter = TimedDrafter(inner, 0.0005, per_candidate=0.001)
    model = TimedModel(0.010, per_row=0.0003, context_length=8192)
    config = replace(quick_config(5, Policy(options.policy)), draft_timeout=2.0)
    async with Deployment([model], [drafter], config) as deployment:
        target = deployment.targets[0]
        for key in session.todo([f"answer {i}" for i in range(options.prompts)]):
            request = GenerationRequest(
                (1, 2, 3 + int(key.split()[1])),
                SamplingParams(temperature=0.0),
                max_tokens=len(PHASES) * options.tokens,
            )
            target.results.clear()
            await deployment.generate(request)
            bodies = [(result.header.base_length, result.body) for result in target.results]
            steps = [
                (base - len(request.token_ids), body.draft_length)
                for base, body in bodies
                if isinstance(body, Committed) and not body.repeated_answer
            ]
            session.record(key, {"steps": steps})


def _phase(row: dict[str, Any], tokens: int, phase: int) -> list[float]:
    """Smoothed draft lengths of the steps that began in it."""
    return _smoothed([length for base, length in row["steps"] if base // tokens == phase])


def _smoothed(lengths: Sequence[int]) -> list[float]:
    return [float(statistics.median(lengths[max(0, i + 1 - SMOOTHED) : i + 1])) for i in range(len(lengths))]


def _former_length(row: dict[str, Any], tokens: int) -> float:
    return statistics.median(_phase(row, tokens, 0)[-30:])


def _until_off(row: dict[str, Any], tokens: int) -> float:
    return _first_index(length == 0 for length in _phase(row, tokens, 1))


def _until_back(row: dict[str, Any], tokens: int) -> float:
    former = _former_length(row, tokens)
    return _first_index(length >= 0.8 * former for length in _phase(row, tokens, 2))


def _first_index(found: Any) -> float:
    """Steps until it is so; all of them if it never is."""
    seen = 0
    for seen, yes in enumerate(found, 1):
        if yes:
            return seen
    return seen
