"""The cells of the statistical test of the law: accept rules x parameters x shapes, over one pair of table laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from specdec.params import AcceptRule, SamplingParams, StopConditions
from tools.table_law import TableLaw

VOCABULARY_SIZE = 16
PROMPT = (3, 5, 3, 11)
ANSWER_LENGTH = 3
STOP = StopConditions(len(PROMPT), len(PROMPT) + ANSWER_LENGTH)

TARGET = TableLaw(VOCABULARY_SIZE, order=2, sharpness=3.0, salt="law")


@dataclass(frozen=True)
class NearLaw:
    """The target's logits, partly replaced by those of another table: a drafter that is right about as often."""

    target: TableLaw
    share: float

    @property
    def vocabulary_size(self) -> int:
        return self.target.vocabulary_size

    @property
    def order(self) -> int:
        return self.target.order

    @cached_property
    def other(self) -> TableLaw:
        return replace(self.target, salt=self.target.salt + " drafter")

    def logits(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        mixed = self.target.logits(context) * (1 - self.share) + self.other.logits(context) * self.share
        return mixed.astype(np.float32)


DRAFT = NearLaw(TARGET, 0.4)

LIKELY, SEEN = 6, 3
PARAMETERS = {
    "T 0.3": SamplingParams(temperature=0.3),
    "T 1.0": SamplingParams(),
    "top-k 5": SamplingParams(top_k=5),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.1": SamplingParams(min_p=0.1),
    "bias": SamplingParams(logit_bias=((1, -100.0), (LIKELY, 1.0))),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.8),
}
SHAPES = {
    "invariant": (AcceptRule.INVARIANT, 1),
    "invariant width 3": (AcceptRule.INVARIANT, 3),
    "rejection": (AcceptRule.REJECTION, 1),
    "rejection width 3": (AcceptRule.REJECTION, 3),
    "block": (AcceptRule.BLOCK, 1),
}


@dataclass(frozen=True)
class LawCell:
    """One way to draw answers of `ANSWER_LENGTH` tokens behind `PROMPT`. width: siblings of each level of a tree."""

    sampling: SamplingParams
    width: int

    @classmethod
    def of(cls, shape: str, parameters: str) -> LawCell:
        rule, width = SHAPES[shape]
        return cls(replace(PARAMETERS[parameters], accept_rule=rule), width)


CELLS = [(shape, parameters) for shape in SHAPES for parameters in PARAMETERS]
