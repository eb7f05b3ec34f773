"""A small language model with the target's vocabulary as drafter.

It proposes `argmax(log q + g)` with the noise that the target will use, so that it proposes what the target draws as
often as their laws agree (arXiv 2408.07978).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.candidates import CandidateTree
from specdec.drafter import Abandoned, DraftJob, never
from specdec.drafters.growth import Growth
from specdec.engine.model import LanguageModel, Segment
from specdec.log import Log


@dataclass(slots=True)
class _Replica:
    """What the model's KV of a sequence was computed for."""

    log: Log
    token_ids: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts for many sequences in packed forwards, one depth of each per forward."""

    def __init__(self, model: LanguageModel, prefill_chunk: int = 256) -> None:
        self.name = "model"
        self.context_length = model.context_length
        self._model = model
        self._prefill_chunk = prefill_chunk
        self._replicas: OrderedDict[str, _Replica] = OrderedDict()  # least lately drafted first
        self._busy: set[str] = set()

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        """Combs of `width` siblings; where the context or the KV memory ends, or the drafter begins to doubt, shorter
        ones or none."""
        growths = [Growth.of(job) for job in jobs]
        self._busy = {job.sequence_id for job in jobs}
        active = [growth for growth in growths if self._realign(growth.job)]
        while active:
            self._prefill(active)
            active = [growth for growth in self._extend(active) if not abandoned(growth.job.sequence_id)]
        return [growth.tree() for growth in growths]

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

    def _prefill(self, active: Sequence[Growth]) -> None:
        """Computes KV until at most a chunk of the known tokens is left, in chunks shared by one forward."""
        while True:
            segments: list[Segment] = []
            for growth in active:
                missing = self._missing(growth)
                chunk = missing[: self._prefill_chunk]
                if len(missing) > len(chunk) and self._reserve(growth.job.sequence_id, len(chunk)):
                    segments.append(Segment(growth.job.sequence_id, tuple(chunk), num_logits=0))
            if not segments:
                return
            self._model.forward(segments)
            for segment in segments:
                self._keep(segment)

    def _extend(self, active: Sequence[Growth]) -> list[Growth]:
        """One more depth for each, from a forward over what is left of the known tokens; returns those that want
        another."""
        ready: list[Growth] = []
        segments: list[Segment] = []
        for growth in active:
            missing = self._missing(growth)
            if len(missing) <= self._prefill_chunk and self._reserve(growth.job.sequence_id, len(missing)):
                ready.append(growth)
                segments.append(Segment(growth.job.sequence_id, tuple(missing)))
        if not segments:
            return []
        for growth, segment, logits in zip(ready, segments, self._model.forward(segments), strict=True):
            self._keep(segment)
            growth.extend(logits)
        return [growth for growth in ready if self._wants_more(growth)]

    def _wants_more(self, growth: Growth) -> bool:
        room = self._model.context_length - len(growth.job.log) - len(growth.spine)
        return (
            not growth.at_dead_end
            and not growth.is_doubtful
            and len(growth.spine) < growth.job.draft_length
            and room > 0
            and growth.spine[-1] not in growth.job.stop.stop_token_ids
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

    def _missing(self, growth: Growth) -> list[int]:
        """Known tokens without KV."""
        replica = self._replicas[growth.job.sequence_id]
        have = len(replica.token_ids)
        log = growth.job.log.token_ids
        return log[have:] + growth.spine[max(have - len(log), 0) :]

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
