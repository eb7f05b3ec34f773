"""Scripted drafters: right, wrong, or odd on purpose. All implement `specdec.drafter.Drafter`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.candidates import EMPTY, ROOT, CandidateTree
from specdec.drafter import Abandoned, Drafter, DraftJob, never
from tools.continuations import Continuation


class Script(Protocol):
    """One block, from what the target would say. continuation: its next tokens, possibly fewer than asked."""

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree: ...


def oracle(job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
    """Everything is accepted."""
    return CandidateTree.chain(continuation[: job.draft_length])


@dataclass(frozen=True, slots=True)
class WrongFrom:
    """Right before `position`, wrong at it, right again behind it. 0 is the anti draft: nothing is accepted."""

    position: int
    vocabulary_size: int

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        chain = list(continuation[: job.draft_length])
        if self.position < len(chain):
            chain[self.position] = (chain[self.position] + 1) % self.vocabulary_size
        return CandidateTree.chain(chain)


@dataclass(frozen=True, slots=True)
class RandomTree:
    """The right path on a random branch among wrong siblings, 1 to `width` of them at each node of the right path."""

    width: int
    vocabulary_size: int
    seed: int = 0

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        rng = random.Random(f"{self.seed} {job.log.token_ids}")
        token_ids: list[int] = []
        parents: list[int] = []
        node = ROOT
        for right in continuation[: job.draft_length]:
            siblings = self._siblings(rng, right)
            first = len(token_ids)
            token_ids += siblings
            parents += [node] * len(siblings)
            for wrong in range(first, len(token_ids)):
                if token_ids[wrong] != right and rng.random() < 0.5:
                    # Right tokens below a wrong one: taking them would be a mistake that looks plausible.
                    token_ids.append(right)
                    parents.append(wrong)
            node = first + siblings.index(right)
        return CandidateTree(tuple(token_ids), tuple(parents))

    def _siblings(self, rng: random.Random, right: int) -> list[int]:
        others = rng.sample(range(self.vocabulary_size - 1), rng.randint(0, self.width - 1))
        siblings = [right, *(token_id + (token_id >= right) for token_id in others)]
        rng.shuffle(siblings)
        return siblings


def empty(job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
    return EMPTY


@dataclass(frozen=True, slots=True)
class Longer:
    """`extra` candidates more than asked, the asked ones right."""

    extra: int

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        asked = list(continuation[: job.draft_length])
        return CandidateTree.chain([*asked, *([0] * self.extra)])


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A right chain with `token_id` in place of the candidate at `position`: out of range, -1, or in the padding."""

    token_id: int
    position: int = 0

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        chain = list(continuation[: job.draft_length])
        if chain:
            chain[min(self.position, len(chain) - 1)] = self.token_id
        return CandidateTree.chain(chain)


@dataclass(frozen=True, slots=True)
class NoTree:
    """A right chain whose parents are out of range."""

    parent: int

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        chain = tuple(continuation[: job.draft_length])
        return CandidateTree(chain, (self.parent,) * len(chain))


class ScriptedDrafter:
    """Runs a script. `script` may be exchanged while it works.

    delay: seconds per call. gate: while cleared, calls wait at their start and `entered` is set: a mute drafter.
    """

    def __init__(
        self, script: Script, continuation: Continuation, *, context_length: int = 0, delay: float = 0.0
    ) -> None:
        self.name = "scripted"
        self.context_length = context_length
        self.script = script
        self.delay = delay
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.num_jobs = 0
        self.known: set[str] = set()
        self._continuation = continuation

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        self.entered.set()
        self.gate.wait()
        if self.delay:
            time.sleep(self.delay)
        self.num_jobs += len(jobs)
        self.known |= {job.sequence_id for job in jobs}
        return [self._one(job) for job in jobs]

    def release(self, sequence_id: str) -> None:
        self.known.discard(sequence_id)

    def _one(self, job: DraftJob) -> CandidateTree:
        if self.context_length and len(job.log) >= self.context_length:
            return EMPTY
        return self.script(job, self._continuation(job))


class FailingDrafter:
    """Raises in every call while `failing`; else does what the inner one does."""

    def __init__(self, inner: Drafter) -> None:
        self.name = inner.name
        self.context_length = inner.context_length
        self.failing = True
        self.num_failures = 0
        self._inner = inner

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        if self.failing:
            self.num_failures += 1
            raise RuntimeError("planted: the drafter fails")
        return self._inner.draft(jobs)

    def release(self, sequence_id: str) -> None:
        self._inner.release(sequence_id)
