"""A small language model with the target's vocabulary as drafter.

It proposes `argmax(log q + g)` with the noise that the target will use, so that it proposes what the target draws as
often as their laws agree (arXiv 2408.07978).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from specdec.candidates import EMPTY, CandidateTree, DraftLaw
from specdec.drafter import Abandoned, DraftJob, never
from specdec.engine.model import LanguageModel, Segment
from specdec.law import Law
from specdec.log import Log
from specdec.noise import Domain, uniforms
from specdec.params import AcceptRule
from specdec.ratio import draw_candidate, quantised
from specdec.sampling import DegenerateLogits


@dataclass(slots=True)
class _Chain:
    """A job in progress and its candidates so far."""

    job: DraftJob
    law: Law
    drafted: list[int] = field(default_factory=list)
    draft_laws: list[DraftLaw] = field(default_factory=list)
    at_dead_end: bool = False

    @classmethod
    def of(cls, job: DraftJob) -> _Chain:
        return cls(job, Law(job.sampling, job.stop, job.log.token_ids, job.mask))

    def extend(self, logits: Tensor) -> None:
        """One more candidate from its logits, [1, vocab]: the target's draw as the drafter sees it, or under the rules
        that test ratios a draw of the drafter's own from exactly the law that is sent. None where the grammar allows
        none. Raises DegenerateLogits."""
        try:
            self._extend(logits)
        except DegenerateLogits:
            if self.job.mask is None:
                raise
            self.at_dead_end = True

    def _extend(self, logits: Tensor) -> None:
        sampling = self.job.sampling
        if sampling.accept_rule is AcceptRule.INVARIANT:
            self.drafted += self.law.draw(logits, [self.drafted])
            return
        draft_law = quantised(self.law.probs(logits, [self.drafted])[0])
        count = len(self.drafted) + 1
        uniform = float(uniforms(sampling.seed, Domain.DRAFT, len(self.job.log), count)[-1])
        self.drafted.append(draw_candidate(draft_law, uniform))
        self.draft_laws.append(draft_law)

    def tree(self) -> CandidateTree:
        return replace(CandidateTree.chain(self.drafted), laws=tuple(self.draft_laws)) if self.drafted else EMPTY


@dataclass(slots=True)
class _Replica:
    """What the model's KV of a sequence was computed for."""

    log: Log
    token_ids: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts chains for many sequences in packed forwards, one token of each per forward."""

    def __init__(self, model: LanguageModel, prefill_chunk: int = 256) -> None:
        self.name = "model"
        self.context_length = model.context_length
        self._model = model
        self._prefill_chunk = prefill_chunk
        self._replicas: OrderedDict[str, _Replica] = OrderedDict()  # least lately drafted first
        self._busy: set[str] = set()

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        """Chains; where the context or the KV memory ends, shorter ones or none."""
        chains = [_Chain.of(job) for job in jobs]
        self._busy = {job.sequence_id for job in jobs}
        active = [chain for chain in chains if self._realign(chain.job)]
        while active:
            self._prefill(active)
            active = [c for c in self._extend(active) if not abandoned(c.job.sequence_id)]
        return [chain.tree() for chain in chains]

    def release(self, sequence_id: str) -> None:
        if self._replicas.pop(sequence_id, None) is not None:
            self._model.release(sequence_id)

    def _realign(self, job: DraftJob) -> bool:
        """Rolls KV back to what it has in common with the log. False if there is no room for a candidate."""
        replica = self._replicas.get(job.sequence_id)
        if replica is not None and replica.log is not job.log:  # opened again
            self.release(job.sequence_id)
            replica = None
        if replica is None:
            replica = self._replicas[job.sequence_id] = _Replica(job.log)
            cached_length = self._model.open(job.sequence_id, job.log)
            replica.token_ids = job.log.token_ids[:cached_length]
        self._replicas.move_to_end(job.sequence_id)
        keep = min(_common_length(replica.token_ids, job.log.token_ids), len(job.log) - 1)
        self._model.truncate(job.sequence_id, keep)
        del replica.token_ids[keep:]
        return job.draft_length > 0 and len(job.log) < self._model.context_length

    def _prefill(self, active: Sequence[_Chain]) -> None:
        """Computes KV until at most a chunk of the known tokens is left, in chunks shared by one forward."""
        while True:
            segments: list[Segment] = []
            for chain in active:
                missing = self._missing(chain)
                chunk = missing[: self._prefill_chunk]
                if len(missing) > len(chunk) and self._reserve(chain.job.sequence_id, len(chunk)):
                    segments.append(Segment(chain.job.sequence_id, tuple(chunk), num_logits=0))
            if not segments:
                return
            self._model.forward(segments)
            for segment in segments:
                self._keep(segment)

    def _extend(self, active: Sequence[_Chain]) -> list[_Chain]:
        """One more candidate for each chain, from a forward over what is left of the known tokens; returns the chains
        that want another."""
        ready: list[_Chain] = []
        segments: list[Segment] = []
        for chain in active:
            missing = self._missing(chain)
            if len(missing) <= self._prefill_chunk and self._reserve(chain.job.sequence_id, len(missing)):
                ready.append(chain)
                segments.append(Segment(chain.job.sequence_id, tuple(missing)))
        if not segments:
            return []
        for chain, segment, logits in zip(ready, segments, self._model.forward(segments), strict=True):
            self._keep(segment)
            chain.extend(logits)
        return [chain for chain in ready if self._wants_more(chain)]

    def _wants_more(self, chain: _Chain) -> bool:
        room = self._model.context_length - len(chain.job.log) - len(chain.drafted)
        return (
            not chain.at_dead_end
            and len(chain.drafted) < chain.job.draft_length
            and room > 0
            and chain.drafted[-1] not in chain.job.stop.stop_token_ids
        )

    def _reserve(self, sequence_id: str, rows: int) -> bool:
        """Makes room, taking KV back from sequences that are not drafted for now."""
        while not self._model.reserve(sequence_id, rows):
            idle = (i for i, replica in self._replicas.items() if i not in self._busy and replica.token_ids)
            victim = next(idle, None)
            if victim is None:
                return False
            self._model.truncate(victim, 0)
            self._replicas[victim].token_ids.clear()
        return True

    def _missing(self, chain: _Chain) -> list[int]:
        """Known tokens without KV."""
        replica = self._replicas[chain.job.sequence_id]
        have = len(replica.token_ids)
        log = chain.job.log.token_ids
        return log[have:] + chain.drafted[max(have - len(log), 0) :]

    def _keep(self, segment: Segment) -> None:
        self._model.keep(segment.sequence_id, range(len(segment.token_ids)))
        self._replicas[segment.sequence_id].token_ids += segment.token_ids


def _common_length(left: list[int], right: list[int]) -> int:
    if left == right[: len(left)]:
        return len(left)
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
