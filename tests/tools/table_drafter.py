"""`TableDrafter`: a drafter with a law of its own, near the target's by a set amount; the sampling is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from specdec.candidates import EMPTY, ROOT, CandidateTree, DraftLaw
from specdec.drafter import Abandoned, DraftJob, never
from specdec.law import Law
from specdec.noise import Domain, uniforms
from specdec.params import AcceptRule
from specdec.ratio import draw_candidate, quantised
from tools.table_law import TableLaw


@dataclass(frozen=True)
class AgreeingLaw:
    """The target's law behind some contexts, and behind the others one of its own.

    agreement: share of the contexts that it knows, and so about the acceptance rate of its chains. runner_up: share of
    the others behind which it has the target's favourite at second place.
    """

    target: TableLaw
    agreement: float
    runner_up: float = 0.0

    @property
    def vocabulary_size(self) -> int:
        return self.target.vocabulary_size

    @property
    def order(self) -> int:
        return self.target.order

    @cached_property
    def own(self) -> TableLaw:
        return replace(self.target, salt=self.target.salt + " drafter")

    def logits(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        own, target = self.own.logits(context), self.target.logits(context)
        if float(own[0]) < self.agreement * self.own.sharpness:
            return target
        return _misled(target, own) if float(own[1]) < self.runner_up * self.own.sharpness else own


def _misled(target: npt.NDArray[np.float32], own: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The target's law, but for one token that comes first."""
    favourite, second = np.argsort(own)[:-3:-1]
    wrong = favourite if favourite != target.argmax() else second
    misled = target.copy()
    misled[wrong] = target.max() + np.float32(1)
    return misled


class TableDrafter:
    """Proposes what an `AgreeingLaw` says under the shared noise."""

    def __init__(
        self, target: TableLaw, agreement: float = 0.8, *, runner_up: float = 0.0, context_length: int = 0
    ) -> None:
        self.name = "table"
        self.context_length = context_length
        self._law = AgreeingLaw(target, agreement, runner_up)

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        return [self._tree(job) for job in jobs]

    def release(self, sequence_id: str) -> None:
        """Holds nothing per sequence."""

    def _tree(self, job: DraftJob) -> CandidateTree:
        if self.context_length and len(job.log) >= self.context_length:
            return EMPTY
        tokens = list(job.log.token_ids)
        token_ids: list[int] = []
        parents: list[int] = []
        laws: list[DraftLaw] = []
        node = ROOT
        for _ in range(job.draft_length):
            if job.sampling.accept_rule is AcceptRule.INVARIANT:
                siblings = self._siblings(tokens, job)
            else:
                drawn = self._drawn(tokens, job)
                siblings = [token_id for token_id, _ in drawn]
                laws += [law for _, law in drawn]
            parents += [node] * len(siblings)
            node = len(token_ids)
            token_ids += siblings
            tokens.append(siblings[0])
        return CandidateTree(tuple(token_ids), tuple(parents), tuple(laws))

    def _siblings(self, tokens: Sequence[int], job: DraftJob) -> list[int]:
        """The likeliest children under the shared noise, best first."""
        logits = torch.tensor(self._law.logits(tokens)).unsqueeze(0)
        scores = Law(job.sampling, job.stop, tokens, job.mask).scores(logits, [()])[0]
        return [int(token_id) for token_id in scores.topk(min(job.width, scores.numel())).indices]

    def _drawn(self, tokens: Sequence[int], job: DraftJob) -> list[tuple[int, DraftLaw]]:
        """Children drawn without replacement, each with the law it was drawn from."""
        logits = torch.tensor(self._law.logits(tokens)).unsqueeze(0)
        law = quantised(Law(job.sampling, job.stop, tokens, job.mask).probs(logits, [()])[0])
        chances = uniforms(job.sampling.seed + len(tokens), Domain.DRAFT, len(job.log), job.width)
        drawn: list[tuple[int, DraftLaw]] = []
        for chance in chances.tolist():
            if law.token_ids:
                token_id = draw_candidate(law, chance)
                drawn.append((token_id, law))
                law = law.without(token_id)
        return drawn
