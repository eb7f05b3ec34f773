"""What the target will say next: the knowledge that lets a scripted drafter be right or wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from specdec.params import SamplingParams
from specdec.sampling import draw
from tools.table_law import TableLaw

Continuation = Callable[[Sequence[int], SamplingParams, int], list[int]]
"""(log, sampling, count) -> the target's next tokens, at most `count`; fewer where it is not known."""


@dataclass(frozen=True)
class LawContinuation:
    """Computed from the target's own table law, for any prompt."""

    law: TableLaw

    def __call__(self, token_ids: Sequence[int], sampling: SamplingParams, count: int) -> list[int]:
        log = list(token_ids)
        for _ in range(count):
            logits = torch.tensor(self.law.logits(log)).unsqueeze(0)
            log += draw(logits, sampling, [len(log)])
        return log[len(token_ids) :]


class KnownContinuation:
    """Looked up among plain outputs that a test recorded: pairs of (prompt, output)."""

    def __init__(self, outputs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        self._logs = [(len(prompt), [*prompt, *output]) for prompt, output in outputs]

    def __call__(self, token_ids: Sequence[int], sampling: SamplingParams, count: int) -> list[int]:
        length = len(token_ids)
        for prompt_length, log in self._logs:
            if prompt_length <= length and log[:length] == list(token_ids):
                return log[length : length + count]
        return []
