"""How one block grows under a model drafter: depth by depth, the likeliest candidate with its siblings.

The block is a comb: the spine is what the drafter would say itself, and every candidate of it may have siblings, the
next likeliest ones, which nothing follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from specdec.candidates import EMPTY, ROOT, CandidateTree, DraftLaw
from specdec.drafter import DraftJob
from specdec.law import Law
from specdec.noise import Domain, uniforms
from specdec.params import AcceptRule
from specdec.ratio import draw_candidate, quantised
from specdec.sampling import DegenerateLogits


@dataclass(frozen=True, slots=True)
class _Depth:
    """token_ids: the candidate of the spine first. laws: one per candidate, or none. confidence: of the first."""

    token_ids: tuple[int, ...]
    confidence: float
    laws: tuple[DraftLaw, ...] = ()


@dataclass(slots=True)
class Growth:
    """A job in progress. spine: its candidates so far, siblings left out."""

    job: DraftJob
    law: Law
    spine: list[int] = field(default_factory=list)
    at_dead_end: bool = False
    _depths: list[_Depth] = field(default_factory=list)
    _certainty: float = 1.0

    @classmethod
    def of(cls, job: DraftJob) -> Growth:
        return cls(job, Law(job.sampling, job.stop, job.log.token_ids, job.mask))

    @property
    def is_doubtful(self) -> bool:
        """What lies behind would gain less than it costs. The doubtful candidate itself stays: whether a candidate is
        verified must not depend on its own value."""
        return self._certainty < self.job.min_confidence

    def extend(self, logits: Tensor) -> None:
        """One depth more from the logits behind the spine, [1, vocab]; none where the grammar allows none. Raises
        DegenerateLogits."""
        try:
            invariant = self.job.sampling.accept_rule is AcceptRule.INVARIANT
            depth = self._shared_draw(logits) if invariant else self._own_draw(logits)
        except DegenerateLogits:
            if self.job.mask is None:
                raise
            self.at_dead_end = True
            return
        self._depths.append(depth)
        self.spine.append(depth.token_ids[0])
        self._certainty *= depth.confidence

    def tree(self) -> CandidateTree:
        token_ids: list[int] = []
        parents: list[int] = []
        laws: list[DraftLaw] = []
        confidences: list[float] = []
        node = ROOT
        for depth in self._depths:
            first = len(token_ids)
            token_ids += depth.token_ids
            parents += [node] * len(depth.token_ids)
            laws += depth.laws
            confidences += [depth.confidence] * len(depth.token_ids)
            node = first
        if not token_ids:
            return EMPTY
        return CandidateTree(tuple(token_ids), tuple(parents), tuple(laws), tuple(confidences))

    def _shared_draw(self, logits: Tensor) -> _Depth:
        """The target's draw as the drafter sees it; its siblings are what the target would draw next likeliest."""
        [best] = self.law.likeliest(logits, [self.spine], max(self.job.width, 2))
        token_ids = tuple(token_id for token_id, _ in best[: self.job.width])
        lead = best[0][1] - best[1][1] if len(best) > 1 else math.inf
        return _Depth(token_ids, 1 / (1 + math.exp(-lead)))

    def _own_draw(self, logits: Tensor) -> _Depth:
        """Draws of the drafter's own, without replacement, from exactly the laws that are sent."""
        law = quantised(self.law.probs(logits, [self.spine])[0])
        width = min(self.job.width, len(law.token_ids))
        count = (len(self.spine) + 1) * width
        draws = uniforms(self.job.sampling.seed, Domain.DRAFT, len(self.job.log), count)[-width:].tolist()
        confidence = max(law.weights) / sum(law.weights)
        token_ids: list[int] = []
        laws: list[DraftLaw] = []
        for draw in draws:
            token_ids.append(draw_candidate(law, draw))
            laws.append(law)
            law = law.without(token_ids[-1])
        return _Depth(tuple(token_ids), confidence, tuple(laws))
