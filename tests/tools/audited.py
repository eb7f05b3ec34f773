"""Deployments of table models whose finished answers are audited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler import counters as names
from scheduler.audit import AuditConfig, Sink, ignore
from scheduler.request import GenerationRequest
from services.telemetry.metrics import Metrics
from tools.cases import GREEDY, SAMPLED, prompts
from tools.deployment import Deployment, quick_config
from tools.exposition import by_label
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw()
EVERY = AuditConfig(share=1.0, queue=256, poll=0.01, timeout=5.0)
PENALISED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
EDITED = replace(GREEDY, logit_bias=((3, 4.0), (5, -100.0)), bad_words=((7,), (8, 9)), repetition_penalty=1.1)


def deployment(
    metrics: Metrics, model: TableModel, audit: AuditConfig = EVERY, found: Sink = ignore, agreement: float = 0.7
) -> Deployment:
    drafter = TableDrafter(LAW, agreement)
    return Deployment([model], [drafter], quick_config(), counters=metrics, audit=audit, on_mismatch=found)


async def audited(metrics: Metrics, count: int) -> dict[str, float]:
    """The outcomes, once there are `count`."""
    await until(lambda: sum(by_label(metrics, names.AUDITS).values()) >= count, f"{count} audits", patience=60.0)
    return by_label(metrics, names.AUDITS)


class EndsAt:
    """A text-level stop behind so many tokens."""

    def __init__(self, length: int) -> None:
        self._left = length

    def ends_after(self, token_ids: Sequence[int]) -> int | None:
        kept, self._left = self._left, self._left - len(token_ids)
        return kept if self._left <= 0 else None


def mixed(count: int) -> list[GenerationRequest]:
    """Greedy and sampled, with penalties, edits, stop tokens, least lengths and text-level stops."""
    laws = (GREEDY, SAMPLED, PENALISED, EDITED)
    return [
        GenerationRequest(
            prompt,
            replace(laws[i % 4], seed=i),
            max_tokens=4 + i % 13,
            min_tokens=i % 5,
            stop_token_ids=frozenset({11, 12}) if i % 3 == 0 else frozenset(),
            watcher=EndsAt(1 + i % 11) if i % 5 == 0 else None,
            draft_length=1 + i % 6,
        )
        for i, prompt in enumerate(prompts(count))
    ]
