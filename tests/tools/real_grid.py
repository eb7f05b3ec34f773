"""Every drafter at every draft length over one real target: run side by side, then held against plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.request import GenerationRequest, SpeculationSummary
from specdec.candidates import ROOT, CandidateTree
from specdec.drafter import Drafter, DraftJob
from specdec.drafters.ngram import NgramDrafter
from specdec.engine.runner import ModelRunner
from specdec.messages import DraftBlock
from specdec.params import SamplingParams
from tools.continuations import Continuation, KnownContinuation
from tools.deployment import Answer
from tools.history import History
from tools.real_prompts import Prompt
from tools.real_system import RealSystem, RealTarget
from tools.scripted import RandomTree, Script, ScriptedDrafter, WrongFrom, oracle

GREEDY = SamplingParams(temperature=0.0)
DRAFT_LENGTHS = (1, 4, 8)
MAX_CONCURRENT = 128
"""Sequences at once: bounds the KV memory that a grid needs."""


@dataclass(frozen=True, slots=True)
class Half:
    """Right in the first half of the block, wrong from its middle on."""

    vocabulary_size: int

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        return WrongFrom(job.draft_length // 2, self.vocabulary_size)(job, continuation)


def _scripted(make: Callable[[int], Script]) -> Callable[[int, Continuation], Drafter]:
    return lambda vocabulary_size, known: ScriptedDrafter(make(vocabulary_size), known)


def _tree(width: int) -> Callable[[int], Script]:
    return lambda vocabulary_size: RandomTree(width, vocabulary_size)


DRAFTERS: dict[str, Callable[[int, Continuation], Drafter]] = {
    "ngram": lambda vocabulary_size, known: NgramDrafter(),
    "oracle": _scripted(lambda vocabulary_size: oracle),
    "anti": _scripted(lambda vocabulary_size: WrongFrom(0, vocabulary_size)),
    "half": _scripted(Half),
    **{f"tree-{width}": _scripted(_tree(width)) for width in (1, 2, 3, 4)},
}


@dataclass(frozen=True, slots=True)
class Cell:
    drafter: str
    draft_length: int

    def __str__(self) -> str:
        return f"{self.drafter}-{self.draft_length}"

    @property
    def right(self) -> int | None:
        """Right candidates at the front of each block; None where that is up to the text."""
        match self.drafter:
            case "ngram":
                return None
            case "anti":
                return 0
            case "half":
                return self.draft_length // 2
        return self.draft_length


CELLS = tuple(Cell(drafter, length) for drafter in DRAFTERS for length in DRAFT_LENGTHS)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a request cost: verifies with candidates, candidates accepted by them, plain steps."""

    num_drafts: int
    num_accepted_tokens: int
    num_plain_steps: int

    @classmethod
    def of(cls, summary: SpeculationSummary) -> Figures:
        return cls(summary.num_drafts, summary.num_accepted_tokens, summary.num_plain_steps)

    @classmethod
    def expected(cls, tokens: int, draft_length: int, right: int) -> Figures:
        """By arithmetic: each verify commits what is right and one token more; the last token needs no candidate."""
        drafts = accepted = plain = 0
        left = tokens
        while left:
            candidates = min(draft_length, left - 1)
            if not candidates:
                plain += 1
                left -= 1
                continue
            drafts += 1
            accepted += min(right, candidates)
            left -= min(right, candidates) + 1
        return cls(drafts, accepted, plain)


@dataclass(frozen=True, slots=True)
class CellRun:
    """One prompt in one cell. other_branches: accepted candidates that were not their parent's first child."""

    prompt: str
    answer: Answer
    other_branches: int

    @property
    def summary(self) -> SpeculationSummary:
        return self.answer.finished.speculation if self.answer.finished else SpeculationSummary()


@dataclass(slots=True)
class Grid:
    """plain: our own plain decoding, per prompt. violations: what the history checker found; empty is good."""

    prompts: Sequence[Prompt]
    tokens: int
    plain: dict[str, list[int]] = field(default_factory=dict)
    runs: dict[Cell, list[CellRun]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    largest_batch: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(run.answer.token_ids) for runs in self.runs.values() for run in runs)


async def run_grid(runner: ModelRunner, prompts: Sequence[Prompt], tokens: int, share: int = 1) -> Grid:
    """Plain first, then all cells as sequences of shared batches.

    share: every how many-th cell a prompt runs in; each prompt begins at another cell, so that all take turns.
    """
    grid = Grid(prompts, tokens)
    async with RealTarget(runner) as target:
        plain = await target.system()
        answers = await asyncio.gather(*(plain.plain(_request(prompt, tokens)) for prompt in prompts))
        grid.plain = {prompt.name: answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)}
        known = KnownContinuation((prompt.token_ids, grid.plain[prompt.name]) for prompt in prompts)
        systems = {name: await target.system(make(runner.vocabulary_size, known)) for name, make in DRAFTERS.items()}
        await _run_cells(grid, systems, share)
        grid.largest_batch = target.worker.load().largest_batch
    runner.check_integrity()
    return grid


async def _run_cells(grid: Grid, systems: dict[str, RealSystem], share: int) -> None:
    history = History()
    room = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(cell: Cell, prompt: Prompt) -> None:
        name = f"{cell} {prompt.name}"
        history.expect(name, grid.plain[prompt.name])
        async with room:
            system = systems[cell.drafter]
            answer = await system.generate(_request(prompt, grid.tokens, cell), history.request(name))
        branches = _other_branches(system, answer, [*prompt.token_ids, *grid.plain[prompt.name]])
        grid.runs.setdefault(cell, []).append(CellRun(prompt.name, answer, branches))

    await asyncio.gather(
        *(
            run(cell, prompt)
            for i, prompt in enumerate(grid.prompts)
            for j, cell in enumerate(CELLS)
            if (i + j) % share == 0
        )
    )
    grid.violations = history.violations()


def _request(prompt: Prompt, tokens: int, cell: Cell | None = None) -> GenerationRequest:
    """Without stop tokens, so that every answer has its full length."""
    return GenerationRequest(
        prompt.token_ids, GREEDY, max_tokens=tokens, draft_length=cell.draft_length if cell else None
    )


def _other_branches(system: RealSystem, answer: Answer, log: list[int]) -> int:
    results = system.draft.results if system.draft else []
    blocks = [
        (result.header.base_length, result.body.candidates)
        for result in results
        if isinstance(result.body, DraftBlock) and result.header.sequence_id == answer.started.sequence_id
    ]
    return sum(off_the_first_branch(tree, log[base:]) for base, tree in blocks)


def off_the_first_branch(tree: CandidateTree, token_ids: list[int]) -> int:
    """Candidates that equal `token_ids` and are not their parent's first child. The last token needs no candidate."""
    node, found = ROOT, 0
    for token_id in token_ids[:-1]:
        children = tree.children(node)
        right = next((child for child in children if tree.token_ids[child] == token_id), None)
        if right is None:
            break
        found += right != children[0]
        node = right
    return found


def cell_problems(grid: Grid, cell: Cell) -> list[str]:
    """Where a cell's figures are not those that its drafter must reach; empty is good."""
    runs = grid.runs[cell]
    problems = [f"{run.prompt}: fell back {run.summary.fallbacks}" for run in runs if run.summary.fallbacks]
    problems += [f"{run.prompt}: stale blocks" for run in runs if run.summary.num_stale_blocks]
    if cell.right is None:
        drafted = sum(run.summary.num_drafts for run in runs)
        return problems if drafted else [*problems, "nothing was drafted"]
    expected = Figures.expected(grid.tokens, cell.draft_length, cell.right)
    for run in runs:
        found = Figures.of(run.summary)
        if found != expected:
            problems.append(f"{run.prompt}: {found}, by arithmetic {expected}")
    return problems
