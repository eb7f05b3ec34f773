"""Every drafter at every draft length, and every fallback, side by side over one target of a `Lab`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.request import Speculation, SpeculationSummary
from services.generation import TokenPrompt, UserRequest
from specdec.candidates import CandidateTree
from specdec.drafter import Drafter, DraftJob
from specdec.drafters.ngram import NgramDrafter
from tools.continuations import Continuation, KnownContinuation, LawContinuation
from tools.lab import Choice, Lab, Station
from tools.scripted import FailingDrafter, RandomTree, ScriptedDrafter, WrongFrom, oracle
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw

LENGTHS = (1, 2, 4, 8)
MAX_CONCURRENT = 200
BLOCKS_BEFORE_KILL = 2


@dataclass(frozen=True, slots=True)
class Half:
    """Right in the first half of the block, wrong from its middle on."""

    vocabulary_size: int

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        return WrongFrom(job.draft_length // 2, self.vocabulary_size)(job, continuation)


DRAFTERS: dict[str, Callable[[TableLaw, Continuation], Drafter]] = {
    "oracle": lambda law, known: ScriptedDrafter(oracle, known),
    "anti": lambda law, known: ScriptedDrafter(WrongFrom(0, law.vocabulary_size), known),
    "half": lambda law, known: ScriptedDrafter(Half(law.vocabulary_size), known),
    "tree": lambda law, known: ScriptedDrafter(RandomTree(3, law.vocabulary_size), known),
    "table": lambda law, known: TableDrafter(law, 0.8),
    "ngram": lambda law, known: NgramDrafter(1, 3),
    "failing": lambda law, known: FailingDrafter(ScriptedDrafter(oracle, known)),
    "killed": lambda law, known: ScriptedDrafter(oracle, known),
}
FALLBACKS = ("failing", "killed", "none")


@dataclass(frozen=True, slots=True)
class Cell:
    drafter: str
    draft_length: int


CELLS = (
    *(Cell(drafter, length) for drafter in DRAFTERS if drafter not in FALLBACKS for length in LENGTHS),
    *(Cell(fallback, 1) for fallback in FALLBACKS),
)


@dataclass(slots=True)
class Grid:
    """plain: the reference, by request. figures: sums by drafter. differences: from plain, one line each."""

    plain: list[list[Choice]] = field(default_factory=list)
    figures: dict[str, SpeculationSummary] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    def add(self, cell: Cell, index: int, choices: Sequence[Choice]) -> None:
        plain = self.plain[index]
        if len(choices) != len(plain):
            self.differences.append(f"{cell} request {index}: {len(choices)} choices, plain {len(plain)}")
            return
        for i, (choice, reference) in enumerate(zip(choices, plain, strict=True)):
            lines = choice.told.differences(reference.told)
            self.differences += [f"{cell} request {index} choice {i}: {line}" for line in lines]
            self._count(cell.drafter, choice)

    def _count(self, drafter: str, choice: Choice) -> None:
        summed = self.figures.setdefault(drafter, SpeculationSummary())
        summed.num_drafts += choice.summary.num_drafts
        summed.num_draft_tokens += choice.summary.num_draft_tokens
        summed.num_accepted_tokens += choice.summary.num_accepted_tokens
        summed.num_plain_steps += choice.summary.num_plain_steps
        for reason, count in choice.summary.fallbacks.items():
            summed.fallbacks[reason] = summed.fallbacks.get(reason, 0) + count


async def run_grid(
    lab: Lab,
    law: TableLaw,
    requests: Sequence[UserRequest],
    *,
    known: bool = False,
    share: int = 1,
) -> Grid:
    """Each request plainly, then in every cell, all at once.

    share: every how many-th cell a request runs in; each begins at another one, so that all take turns.
    known: the scripted drafters know the plain answers and not the law; the prompts must be token ids, all different.
    """
    grid = Grid()
    grid.plain = list(await asyncio.gather(*(lab.ask_plainly(request) for request in requests)))
    continuation = KnownContinuation(_outputs(requests, grid.plain)) if known else LawContinuation(law)
    stations = {name: await _station(lab, name, law, continuation) for name in {cell.drafter: None for cell in CELLS}}
    room = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(cell: Cell, index: int) -> None:
        request = replace(requests[index], speculation=Speculation.ON, draft_length=cell.draft_length)
        async with room:
            grid.add(cell, index, await stations[cell.drafter].ask(request))

    cells = [(cell, i) for i in range(len(requests)) for j, cell in enumerate(CELLS) if _has_turn(cell, i + j, share)]
    await asyncio.gather(*(run(cell, i) for cell, i in cells))
    return grid


async def equal_everywhere(
    lab: Lab,
    law: TableLaw,
    requests: Sequence[UserRequest],
    *,
    known: bool = False,
    share: int = 1,
) -> Grid:
    """`run_grid`, with no difference from plain in any cell, and every drafter at work as it should be."""
    grid = await run_grid(lab, law, requests, known=known, share=share)
    assert not grid.differences, "\n".join(grid.differences[:5])
    assert not _idle(grid.figures), _idle(grid.figures)
    assert lab.largest_batch >= min(8, len(requests))
    return grid


def _has_turn(cell: Cell, number: int, share: int) -> bool:
    """Whoever shares a drafter that is killed is in it, so that the kill hits some of them in the middle."""
    return cell.drafter == "killed" or number % share == 0


def _idle(figures: Mapping[str, SpeculationSummary]) -> list[str]:
    """Drafters and fallbacks that were not at work as they should be: equality would then say nothing."""
    lazy = [name for name in ("oracle", "half", "tree", "table") if not figures[name].num_accepted_tokens]
    if not figures["anti"].num_drafts or figures["anti"].num_accepted_tokens:
        lazy.append("anti")
    lazy += [name for name in ("failing", "none") if figures[name].num_drafts]
    lazy += [name for name in ("failing", "killed") if not figures[name].fallbacks.get("failed")]
    return lazy if figures["killed"].num_plain_steps else [*lazy, "killed"]


def _outputs(
    requests: Sequence[UserRequest], plain: Sequence[Sequence[Choice]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for request, choices in zip(requests, plain, strict=True):
        if isinstance(request.prompt, TokenPrompt):
            yield from ((request.prompt.token_ids, choice.told.token_ids) for choice in choices)


async def _station(lab: Lab, name: str, law: TableLaw, known: Continuation) -> Station:
    if name == "none":
        return await lab.station()
    station = await lab.station(DRAFTERS[name](law, known), width=2 if name == "table" else 1)
    if name == "killed":
        station.kill_drafter_after(BLOCKS_BEFORE_KILL)
    return station
