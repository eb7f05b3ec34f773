"""The goodput policy in a whole system: off when drafting stops paying, back when it pays, and no token changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from scheduler.config import Policy, SchedulerConfig
from scheduler.request import GenerationRequest, Started, Tokens
from specdec.candidates import CandidateTree
from specdec.decision import Decision
from specdec.drafter import Abandoned, DraftJob, never
from specdec.engine.model import Segment
from specdec.goodput import Explained
from specdec.params import SamplingParams
from tools.chances import RightBy
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.scripted import Script, ScriptedDrafter, WrongFrom, oracle
from tools.table_law import TableLaw
from tools.table_model import TableModel

pytestmark = pytest.mark.slow
"""Real delays, and shares of decisions: true on a machine that has time, so not in every run."""

LAW = TableLaw()
REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.0), max_tokens=600)
BAD_FROM, GOOD_FROM = 220, 420


def _phases(position: int) -> float:
    return 0.05 if BAD_FROM <= position < GOOD_FROM else 0.9


def _config(max_window: int = 1, max_draft_length: int = 8) -> SchedulerConfig:
    config = quick_config(5, Policy.GOODPUT)
    return replace(config, max_window=max_window, max_draft_length=max_draft_length)


def _drafter(script: Script, delay: float) -> ScriptedDrafter:
    return ScriptedDrafter(script, LawContinuation(LAW), delay=delay)


def _model(delay: float) -> TableModel:
    return TableModel(LAW, delay=delay, context_length=1024)


@dataclass(frozen=True, slots=True)
class _Seen:
    """After a commit: the log's length, what is decided now, and how much the drafter was sent so far."""

    length: int
    explained: Explained
    num_draft_items: int

    @property
    def decision(self) -> Decision:
        return self.explained.decision


async def _watch(deployment: Deployment, request: GenerationRequest) -> tuple[list[int], list[_Seen]]:
    token_ids: list[int] = []
    seen: list[_Seen] = []
    sequence_id = ""
    async for event in deployment.scheduler.generate(request):
        if isinstance(event, Started):
            sequence_id = event.sequence_id
        elif isinstance(event, Tokens):
            token_ids += event.token_ids
            length = len(request.token_ids) + len(token_ids)
            decisions = deployment.scheduler.explained(sequence_id)
            seen.append(_Seen(length, decisions[-1], len(deployment.drafts[0].items)))
    return token_ids, seen


def _usual_length(seen: Sequence[_Seen]) -> float:
    lengths = sorted(s.decision.draft_length for s in seen if not s.decision.off and not s.decision.probe)
    return lengths[len(lengths) // 2]


async def test_bad_traffic_switches_off_and_good_traffic_comes_back() -> None:
    """Acceptance 0.9, 0.05, 0.9 along one sequence."""
    drafter = _drafter(RightBy(_phases, LAW.vocabulary_size), delay=0.004)
    async with Deployment([_model(0.010)], [drafter], _config()) as deployment:
        token_ids, seen = await _watch(deployment, REQUEST)
        former = _usual_length([s for s in seen if 60 < s.length < BAD_FROM])
        bad = [s for s in seen if BAD_FROM <= s.length < GOOD_FROM]
        good = [s for s in seen if s.length >= GOOD_FROM]
        assert former >= 4
        assert any(s.decision.off for s in bad[:10])
        probes = [s for s in bad if s.decision.probe]
        assert 2 <= len(probes) <= len(bad) / 6
        assert max(s.decision.draft_length for s in good[:50]) >= 0.8 * former
        assert _usual_length(good[-20:]) >= 0.8 * former
        assert token_ids == (await deployment.plain(REQUEST)).token_ids


async def test_while_off_the_drafter_is_sent_nothing_but_probes() -> None:
    drafter = _drafter(WrongFrom(0, LAW.vocabulary_size), delay=0.002)
    async with Deployment([_model(0.005)], [drafter], _config()) as deployment:
        _, seen = await _watch(deployment, replace(REQUEST, max_tokens=250))
        off = next(i for i, s in enumerate(seen) if s.decision.off and s.explained.plain > 0)
        for before, after in zip(seen[off:], seen[off + 1 :], strict=False):
            if after.decision.off:
                assert after.num_draft_items == before.num_draft_items
        assert drafter.num_jobs < 40
        assert sum(s.decision.off for s in seen) > 200


async def test_what_one_sequence_learned_spares_the_next() -> None:
    drafter = _drafter(WrongFrom(0, LAW.vocabulary_size), delay=0.002)
    async with Deployment([_model(0.005)], [drafter], _config()) as deployment:
        for _ in range(2):
            answer = await deployment.generate(replace(REQUEST, max_tokens=100))
        assert answer.finished is not None
        assert answer.finished.speculation.num_draft_tokens <= 4
        assert answer.token_ids == (await deployment.plain(replace(REQUEST, max_tokens=100))).token_ids


async def test_hardware_of_its_own_drafts_ahead() -> None:
    """Drafting takes as long as verifying, and the link is slow: a window hides both."""
    async with Deployment([_model(0.010)], [_drafter(oracle, delay=0.010)], _config(8)) as deployment:
        deployment.drafts[0].delay = 0.005
        token_ids, seen = await _watch(deployment, replace(REQUEST, max_tokens=500))
        late = [s for s in seen if s.length > 250]
        assert sum(s.decision.window > 1 for s in late) > 0.8 * len(late)
        assert token_ids == (await deployment.plain(replace(REQUEST, max_tokens=500))).token_ids


class _SharedModel(TableModel):
    """Holds the machine for a forward."""

    machine = threading.Lock()

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        with self.machine:
            return super().forward(segments)


class _SharedDrafter(ScriptedDrafter):
    """Waits until the target leaves the machine to it."""

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        with _SharedModel.machine:
            return super().draft(jobs, abandoned)


async def test_shared_hardware_waits() -> None:
    """Whoever drafts ahead in vain holds the target up."""
    script = RightBy(lambda position: 0.75, LAW.vocabulary_size)
    drafter = _SharedDrafter(script, LawContinuation(LAW), delay=0.010)
    model = _SharedModel(LAW, delay=0.010, context_length=1024)
    async with Deployment([model], [drafter], _config(8)) as deployment:
        _, seen = await _watch(deployment, replace(REQUEST, max_tokens=500))
        late = [s for s in seen if s.length > 200]
        assert sum(s.decision.window == 1 for s in late) > 0.7 * len(late)


class _RowModel(TableModel):
    """A forward takes time for each row: a machine at the limit of its arithmetic."""

    per_row = 0.0015

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        self.delay = 0.002 + self.per_row * max(sum(len(s.token_ids) for s in segments) - 6, 0)
        return super().forward(segments)


async def test_a_batch_that_grows_switches_speculation_off() -> None:
    """Acceptance stays; what is right does not."""
    script = RightBy(lambda position: 0.7, LAW.vocabulary_size)
    model = _RowModel(LAW, context_length=1024)
    async with Deployment([model], [_drafter(script, delay=0.001)], _config()) as deployment:
        _, alone = await _watch(deployment, replace(REQUEST, max_tokens=250))
        assert _usual_length([s for s in alone if s.length > 100]) >= 2
        requests = [replace(REQUEST, token_ids=(1, i, 3), max_tokens=120) for i in range(12)]
        together = await asyncio.gather(*(_watch(deployment, request) for request in requests))
        late = [s for _, seen in together for s in seen if s.length > 60]
        assert sum(s.decision.off for s in late) > 0.7 * len(late)


async def test_many_sequences_begin_together_on_workers_that_nothing_is_known_of() -> None:
    script = RightBy(lambda position: 0.8, LAW.vocabulary_size)
    async with Deployment([_model(0.005)], [_drafter(script, delay=0.002)], _config(8)) as deployment:
        requests = [replace(REQUEST, token_ids=(1, i, 3), max_tokens=60) for i in range(16)]
        answers = await asyncio.gather(*(deployment.generate(request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert answer.token_ids == (await deployment.plain(request)).token_ids
        await deployment.idle()


async def test_decisions_are_kept_with_their_reasons_and_bounded() -> None:
    async with Deployment([_model(0.002)], [_drafter(oracle, delay=0.001)], _config()) as deployment:
        answer = await deployment.generate(replace(REQUEST, max_tokens=700))
        explained = deployment.scheduler.explained(answer.started.sequence_id)
        assert 20 < len(explained) <= 128
        last = explained[-1]
        assert last.goodput > last.plain > 0
        assert last.inputs.acceptance[0] > 0.8
        assert deployment.scheduler.explained("unknown") == ()
