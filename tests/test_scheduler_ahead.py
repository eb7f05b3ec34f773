"""Draft-ahead: blocks lie ready before the block they extend was verified, and no token changes for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scheduler.config import SchedulerConfig
from scheduler.in_flight import InFlight, Outcome
from scheduler.request import GenerationRequest, SpeculationSummary
from specdec.candidates import CandidateTree
from specdec.digest import root_digest
from specdec.log import Log
from specdec.params import SamplingParams
from tools.continuations import LawContinuation, plain_output
from tools.deployment import Deployment, quick_config
from tools.scripted import RandomTree, Script, ScriptedDrafter, WrongFrom, oracle
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw()
REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=120)
SLOW = 0.02
"""Seconds of a forward: however busy the machine is, a block that is drafted ahead comes before its end."""


def _config(window: int) -> SchedulerConfig:
    return replace(quick_config(4), window=window)


def _drafter(script: Script = oracle) -> ScriptedDrafter:
    return ScriptedDrafter(script, LawContinuation(LAW))


async def _summary(deployment: Deployment, request: GenerationRequest = REQUEST) -> SpeculationSummary:
    """Of an answer whose tokens are those of plain decoding."""
    answer = await deployment.generate(request)
    assert answer.token_ids == plain_output(LAW, request.token_ids, request.sampling, request.max_tokens or 0)
    assert answer.finished is not None
    return answer.finished.speculation


@pytest.mark.parametrize("window", [2, 4, 8])
async def test_blocks_of_an_oracle_all_hit(window: int) -> None:
    async with Deployment([TableModel(LAW, delay=SLOW)], [_drafter()], _config(window)) as deployment:
        speculation = await _summary(deployment)
        assert speculation.num_ahead_hits > 15
        assert speculation.num_ahead_misses == 0
        assert speculation.num_accepted_tokens == speculation.num_draft_tokens
        await deployment.idle()


async def test_stop_and_wait_never_drafts_ahead() -> None:
    async with Deployment([TableModel(LAW, delay=0.002)], [_drafter()], _config(1)) as deployment:
        speculation = await _summary(deployment)
        assert (speculation.num_ahead_hits, speculation.num_ahead_misses) == (0, 0)


async def test_blocks_behind_a_rejection_miss_and_are_dropped() -> None:
    drafter = _drafter(WrongFrom(2, LAW.vocabulary_size))
    async with Deployment([TableModel(LAW, delay=SLOW)], [drafter], _config(3)) as deployment:
        speculation = await _summary(deployment)
        assert speculation.num_ahead_misses > 10
        assert speculation.num_ahead_hits == 0
        assert deployment.targets[0].worker.load().stale_blocks > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("window", [2, 5])
async def test_many_sequences_with_a_drafter_that_errs_equal_plain(window: int, temperature: float) -> None:
    config = replace(_config(window), width=2)
    async with Deployment([TableModel(LAW, delay=SLOW)], [TableDrafter(LAW, 0.8)], config) as deployment:
        requests = [
            replace(
                REQUEST, token_ids=(1, i, 3), max_tokens=60, sampling=SamplingParams(temperature=temperature, seed=i)
            )
            for i in range(8)
        ]
        answers = await asyncio.gather(*(_summary(deployment, request) for request in requests))
        assert sum(speculation.num_ahead_hits for speculation in answers) > 0
        assert sum(speculation.num_ahead_misses for speculation in answers) > 0


async def test_blocks_far_behind_a_rejection_pile_up_without_harm() -> None:
    """More of them than a target holds: the oldest give way, and the sequence stays where it is."""
    drafter = _drafter(WrongFrom(1, LAW.vocabulary_size))
    config = replace(_config(4), draft_length=12, max_draft_length=12)
    async with Deployment([TableModel(LAW, delay=0.005)], [drafter], config) as deployment:
        assert (await _summary(deployment)).num_failovers == 0


async def test_trees_are_drafted_ahead_too() -> None:
    drafter = _drafter(RandomTree(3, LAW.vocabulary_size))
    async with Deployment([TableModel(LAW, delay=0.002)], [drafter], _config(3)) as deployment:
        await _summary(deployment)


async def test_a_killed_target_in_a_window_changes_nothing() -> None:
    models = [TableModel(LAW), TableModel(LAW)]
    for model in models:
        model.hold_at(80)
    async with Deployment(models, [_drafter()], _config(4)) as deployment:
        task = asyncio.create_task(deployment.generate(REQUEST))
        await until(lambda: any(len(s.token_ids) > 40 for s in deployment.scheduler.sequences()), "tokens came")
        holder = deployment.scheduler.sequences()[0].target_worker
        next(t for t in deployment.targets if t.address == holder).kill()
        for model in models:
            model.gate.set()
        answer = await task
    assert answer.token_ids == plain_output(LAW, REQUEST.token_ids, REQUEST.sampling, REQUEST.max_tokens or 0)


def test_a_block_is_decided_when_the_log_reaches_its_base() -> None:
    log = Log(root_digest(b"", "m"), [1, 2])
    blocks = InFlight(log)
    ahead = Log(log.root, [1, 2, 3, 4])
    blocks.forwarded(2, log.digest, CandidateTree.chain([3, 4]))
    blocks.forwarded(4, ahead.digest, CandidateTree.chain([5, 6]))
    blocks.forwarded(6, Log(log.root, [1, 2, 3, 4, 5, 6]).digest, CandidateTree.chain([7]))
    log.append([3])
    assert blocks.log_grew() == Outcome()
    log.append([4, 5])
    assert blocks.log_grew() == Outcome(hits=1)
    assert blocks.covers
    log.append([9])
    assert blocks.log_grew() == Outcome(misses=1)
    assert not blocks.covers
