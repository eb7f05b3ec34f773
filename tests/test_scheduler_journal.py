"""The journal tells all that happened to a sequence, in order: whoever reads it could write the answer again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from scheduler.config import Policy
from scheduler.entries import Admitted, Draft, Dropped, Ended, Entry, FellBack, Placed, Step
from scheduler.request import GenerationRequest, Tokens
from specdec.commit import FinishReason
from specdec.params import SamplingParams
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.scripted import Script, ScriptedDrafter, WrongFrom, oracle
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw()
REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=40, request_id="r-1")


def _drafter(script: Script = oracle) -> ScriptedDrafter:
    return ScriptedDrafter(script, LawContinuation(LAW))


@pytest.mark.parametrize("window", [1, 3])
async def test_the_steps_make_up_the_answer(window: int) -> None:
    read: list[Entry] = []
    config = replace(quick_config(4), window=window)
    async with Deployment([TableModel(LAW, delay=0.01)], [_drafter()], config, readers=[read.append]) as deployment:
        answer = await deployment.generate(REQUEST)
    assert isinstance(read[0], Admitted)
    assert read[0].request_id == "r-1"
    assert read[0].prompt_tokens == 3
    assert isinstance(read[1], Placed)
    assert read[1].target_worker
    assert not read[1].cause
    steps = [entry for entry in read if isinstance(entry, Step)]
    assert [token for step in steps for token in step.token_ids] == answer.token_ids
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [step.position for step in steps] == [sum(len(s.token_ids) for s in steps[:i]) for i in range(len(steps))]
    rounds = [step for step in steps if step.draft]
    assert rounds
    assert all(step.num_draft_tokens for step in rounds)
    for step in rounds:
        draft: Draft = step.draft  # type: ignore[assignment]  # filtered above
        assert draft.draft_worker
        assert draft.arrived_at <= step.began_at <= step.at
        assert (draft.asked_at is None) == draft.ahead
        assert draft.base_length <= step.position + 3
        assert step.accepted == step.num_draft_tokens  # an oracle's candidates are all right
    assert any(step.draft.ahead for step in rounds if step.draft) == (window > 1)
    last = read[-1]
    assert isinstance(last, Ended)
    assert last.finish_reason is FinishReason.LENGTH
    assert not last.error
    assert last.completion_tokens == len(answer.token_ids)


async def test_stale_blocks_are_told_as_often_as_they_are_counted() -> None:
    read: list[Entry] = []
    drafter = _drafter(WrongFrom(2, LAW.vocabulary_size))
    config = replace(quick_config(4), window=3)
    async with Deployment([TableModel(LAW, delay=0.01)], [drafter], config, readers=[read.append]) as deployment:
        answer = await deployment.generate(REQUEST)
    assert answer.finished is not None
    speculation = answer.finished.speculation
    assert speculation.num_stale_blocks > 0
    assert sum(isinstance(entry, Dropped) for entry in read) == speculation.num_stale_blocks


async def test_fallbacks_are_told_with_their_reasons() -> None:
    read: list[Entry] = []
    drafter = _drafter(WrongFrom(0, LAW.vocabulary_size))
    config = replace(quick_config(4), policy=Policy.THRESHOLD)
    async with Deployment([TableModel(LAW, delay=0.002)], [drafter], config, readers=[read.append]) as deployment:
        answer = await deployment.generate(replace(REQUEST, max_tokens=120))
    assert answer.finished is not None
    fallbacks = answer.finished.speculation.fallbacks
    assert fallbacks["low_acceptance"] > 0
    assert Counter(entry.reason for entry in read if isinstance(entry, FellBack)) == fallbacks


async def test_a_failover_tells_its_cause_and_a_cancelled_sequence_its_end() -> None:
    read: list[Entry] = []
    models = [TableModel(LAW, delay=0.005) for _ in range(2)]
    async with Deployment(models, [_drafter()], readers=[read.append]) as deployment:
        stream = deployment.scheduler.generate(replace(REQUEST, max_tokens=400))
        seen = 0
        async for event in stream:
            if isinstance(event, Tokens):
                seen += 1
                if seen == 3:
                    placed = next(entry for entry in read if isinstance(entry, Placed))
                    deployment.targets[int(placed.target_worker[-1])].kill()
                if seen == 20:  # far behind what had come when the target was killed
                    break
        await stream.aclose()
    places = [entry for entry in read if isinstance(entry, Placed)]
    assert len(places) == 2
    assert places[1].epoch > places[0].epoch
    assert places[1].cause
    assert places[1].target_worker != places[0].target_worker
    last = read[-1]
    assert isinstance(last, Ended)
    assert last.finish_reason is None
    assert last.error == "cancelled"
