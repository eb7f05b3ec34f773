"""One draft worker for several schedulers and targets: one forward of its model drafts for sequences of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import torch

from scheduler.request import GenerationRequest, Speculation
from scheduler.scheduler import Scheduler
from specdec.drafters.model import ModelDrafter
from specdec.engine.model import Segment
from specdec.messages import DraftItem, DraftOpen, DraftResult, Role
from tools.cases import GREEDY
from tools.continuations import plain_output
from tools.deployment import Deployment, SystemUnderTest, quick_config
from tools.network import Endpoint
from tools.recorder import MemoryRecorder
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw()
TOKENS = 40


class WatchedModel(TableModel):
    """forwards: the sequences of each."""

    def __init__(self) -> None:
        super().__init__(LAW)
        self.forwards: list[set[str]] = []

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        logits = super().forward(segments)
        self.forwards.append({segment.sequence_id for segment in segments})
        return logits


def owners(drafts: Endpoint[DraftItem, DraftResult]) -> dict[str, str]:
    """Scheduler of each sequence that was opened on the draft worker."""
    opened = (item.header for item in drafts.items if isinstance(item.body, DraftOpen))
    return {header.sequence_id: header.epoch.owner for header in opened}


async def test_one_draft_forward_holds_sequences_of_two_targets_and_two_schedulers_and_each_gets_its_own() -> None:
    model = WatchedModel()
    async with Deployment([TableModel(LAW)], [ModelDrafter(model)]) as system:
        second = system.add_target(TableModel(LAW))
        recorder = MemoryRecorder()
        scheduler = Scheduler(replace(quick_config(), scheduler_id="other"), system.network.make_link, recorder)
        other = SystemUnderTest(scheduler, recorder)
        await scheduler.start()
        scheduler.add_worker(Role.TARGET, second.address)
        scheduler.add_worker(Role.DRAFT, system.drafts[0].address)
        await until(other.settled, "the other scheduler is ready")

        model.gate.clear()  # the first one's forward waits, so that the next is of all who have come meanwhile
        asked = [(system, 5), (system, 6), (other, 7), (other, 8)]
        running = []
        for asking, first in asked:
            request = GenerationRequest((first, 1, 2), GREEDY, max_tokens=TOKENS, speculation=Speculation.ON)
            running.append(asyncio.create_task(asking.generate(request)))
            await until(lambda: len(owners(system.drafts[0])) == len(running), "the drafter was told of it")
        await until(model.entered.is_set, "the first draft has begun")
        model.gate.set()
        answers = await asyncio.gather(*running)
        await scheduler.close()

    owner = owners(system.drafts[0])
    assert any(len({owner[name] for name in forward}) == 2 for forward in model.forwards)
    for (_, first), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == plain_output(LAW, (first, 1, 2), GREEDY, TOKENS)
        assert answer.finished is not None
        assert answer.finished.speculation.acceptance_rate == 1.0  # what it got was drafted for it, and for no other
