"""Selection: which rows of which sequences go into the next packed forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.candidates import ROOT, CandidateTree
from specdec.engine.model import LanguageModel, Segment
from specdec.metric import NO_COUNTERS, Counters
from target_worker import counters as metrics
from target_worker.config import TargetConfig
from target_worker.sequence import TargetSequence


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a forward. missing: log tokens whose KV is computed now. candidates: verified behind
    them; None for a prefill chunk that decides nothing."""

    sequence: TargetSequence
    missing: int
    candidates: CandidateTree | None
    segment: Segment

    @property
    def decides(self) -> bool:
        return self.candidates is not None


def make_work(sequence: TargetSequence, kv_length: int, chunk: int, now: float) -> Work | None:
    """What this sequence can do next: a step if it may and its prefill fits one chunk, a prefill chunk, or nothing."""
    token_ids = sequence.log.token_ids
    missing = token_ids[kv_length : kv_length + chunk]
    reaches_end = kv_length + len(missing) == len(token_ids)
    if reaches_end and sequence.may_step(now):
        candidates = sequence.candidates()
        return Work(sequence, len(missing), candidates, step_segment(sequence.sequence_id, missing, candidates))
    if reaches_end:
        missing = missing[:-1]  # the last token waits for the step that needs its logits
    if not missing:
        return None
    return Work(sequence, len(missing), None, Segment(sequence.sequence_id, tuple(missing), num_logits=0))


def step_segment(sequence_id: str, missing: Sequence[int], candidates: CandidateTree) -> Segment:
    """The missing tokens as a chain, and the candidate tree hanging from the last of them."""
    last = len(missing) - 1
    parents = [*range(-1, last), *(last if p == ROOT else len(missing) + p for p in candidates.parents)]
    return Segment(sequence_id, (*missing, *candidates.token_ids), tuple(parents), 1 + len(candidates))


class Selector:
    """Fills a forward: steps first, then prefill chunks, up to the token budget. Takes turns when the budget is short,
    and when KV is short takes it back from the youngest."""

    def __init__(self, config: TargetConfig, model: LanguageModel, counters: Counters = NO_COUNTERS) -> None:
        self._config = config
        self._model = model
        self._counters = counters
        self._turn = 0

    def select(self, sequences: Iterable[TargetSequence], now: float) -> list[Work]:
        running = [s for s in sequences if not s.finished and now < s.deadline]
        possible = [
            work
            for sequence in self._rotated(running)
            if (work := make_work(sequence, self._kv_length(sequence), self._config.prefill_chunk, now))
        ]
        possible.sort(key=lambda work: (not work.decides, work.missing > 1))  # stable: turns are kept
        return self._reserve(self._within_budget(possible), running)

    def starved(self, sequences: Iterable[TargetSequence], now: float) -> list[TargetSequence]:
        """After an empty selection: sequences that have work but no KV even with the pool to themselves. Others wait
        for those that hold KV and have nothing to do at the moment."""
        unfinished = [s for s in sequences if not s.finished]
        holders = [s for s in unfinished if self._kv_length(s) > 0]
        return [s for s in unfinished if now < s.deadline and holders in ([], [s]) and self._wants(s, now)]

    def _wants(self, sequence: TargetSequence, now: float) -> bool:
        return make_work(sequence, self._kv_length(sequence), self._config.prefill_chunk, now) is not None

    def _kv_length(self, sequence: TargetSequence) -> int:
        return self._model.kv_length(sequence.sequence_id)

    def _rotated(self, sequences: list[TargetSequence]) -> list[TargetSequence]:
        self._turn = (self._turn + 1) % max(len(sequences), 1)
        return sequences[self._turn :] + sequences[: self._turn]

    def _within_budget(self, possible: list[Work]) -> list[Work]:
        budget = self._config.token_budget
        selected: list[Work] = []
        for work in possible:
            rows = len(work.segment.token_ids)
            if selected and rows > budget:
                continue
            selected.append(work)
            budget -= rows
        return selected

    def _reserve(self, selected: list[Work], running: list[TargetSequence]) -> list[Work]:
        """Keeps the work whose rows have room, oldest sequence first, so that the oldest always gets on."""
        age = {sequence.sequence_id: i for i, sequence in enumerate(running)}
        placed: list[Work] = []
        preempted: set[str] = set()
        for work in sorted(selected, key=lambda work: age[work.sequence.sequence_id]):
            if work.sequence.sequence_id in preempted:
                continue
            if self._make_room(work, running, placed, preempted):
                placed.append(work)
        return placed

    def _make_room(self, work: Work, running: list[TargetSequence], placed: list[Work], preempted: set[str]) -> bool:
        sequence_id, rows = work.segment.sequence_id, len(work.segment.token_ids)
        busy = {other.segment.sequence_id for other in placed}
        while not self._model.reserve(sequence_id, rows):
            victim = self._victim(sequence_id, running, busy)
            if victim is None:
                return False
            self._model.truncate(victim, 0)
            self._counters.add(metrics.PREEMPTIONS)
            preempted.add(victim)
        return True

    def _victim(self, sequence_id: str, running: list[TargetSequence], busy: set[str]) -> str | None:
        """The youngest sequence that holds KV, is not in this forward, and is younger than `sequence_id`."""
        for sequence in reversed(running):
            if sequence.sequence_id == sequence_id:
                return None
            if sequence.sequence_id not in busy and self._kv_length(sequence) > 0:
                return sequence.sequence_id
        return None
