"""What the target will say next: the knowledge that lets a scripted drafter be right or wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from specdec.drafter import DraftJob
from specdec.law import Law
from specdec.params import SamplingParams, StopConditions
from tools.table_law import TableLaw

Continuation = Callable[[DraftJob], list[int]]
"""The target's next tokens behind the job's log, `draft_length` of them; fewer where it is not known."""


@dataclass(frozen=True)
class LawContinuation:
    """Computed from the target's own table law, for any prompt."""

    law: TableLaw

    def __call__(self, job: DraftJob) -> list[int]:
        return plain_output(self.law, job.log.token_ids, job.sampling, job.draft_length, job.stop)


class KnownContinuation:
    """Looked up among plain outputs that a test recorded: pairs of (prompt, output)."""

    def __init__(self, outputs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        self._logs = [(len(prompt), [*prompt, *output]) for prompt, output in outputs]

    def __call__(self, job: DraftJob) -> list[int]:
        length = len(job.log)
        for prompt_length, log in self._logs:
            if prompt_length <= length and log[:length] == job.log.token_ids:
                return log[length : length + job.draft_length]
        return []


def plain_output(
    law: TableLaw, prompt: Sequence[int], sampling: SamplingParams, count: int, stop: StopConditions | None = None
) -> list[int]:
    """`count` tokens of the target behind `prompt`, drawn one by one from the law alone; stops are not applied."""
    log = list(prompt)
    free = StopConditions(len(prompt), 2**31)
    for _ in range(count):
        matters = stop is not None and (len(log) < stop.min_length or sampling.depends_on_history)
        log.append(_next_token(law, tuple(log), sampling, stop if matters and stop else free))
    return log[len(prompt) :]


@lru_cache(maxsize=1 << 16)
def _next_token(law: TableLaw, log: tuple[int, ...], sampling: SamplingParams, stop: StopConditions) -> int:
    return Law(sampling, stop, log).draw(torch.tensor(law.logits(log)).unsqueeze(0), [()])[0]
