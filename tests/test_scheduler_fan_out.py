"""Outcome fan-out: misses become hits where the target decides the drafter's runner-up, and no token changes for it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from draft_worker.fan_out import Doubt, FanOut, doubts_of, likeliest, narrowed
from draft_worker.sequence import DraftSequence
from scheduler.config import SchedulerConfig
from scheduler.entries import Entry, Step
from scheduler.in_flight import InFlight, Outcome
from scheduler.request import GenerationRequest, SpeculationSummary
from specdec.candidates import EMPTY, ROOT, CandidateTree
from specdec.commit import TokenSource
from specdec.digest import root_digest
from specdec.drafter import Abandoned, DraftJob, never
from specdec.drafters.model import ModelDrafter
from specdec.log import Log
from specdec.messages import DraftPlan, Epoch
from specdec.params import AcceptRule, SamplingParams, StopConditions
from tools.continuations import LawContinuation, plain_output
from tools.deployment import Deployment, quick_config
from tools.scripted import ScriptedDrafter
from tools.table_drafter import AgreeingLaw, TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw()
REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=70)
ROOT_DIGEST = root_digest(b"", "m")


def _config(window: int = 3, fan_out: int = 3) -> SchedulerConfig:
    return replace(quick_config(4), window=window, fan_out=fan_out)


@dataclass(frozen=True, slots=True)
class ErringEvery:
    """A chain that is wrong at each `distance`-th token of the log, with the right one as the runner-up there."""

    distance: int

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        token_ids: list[int] = []
        parents: list[int] = []
        node = ROOT
        for position, right in enumerate(continuation[: job.draft_length], len(job.log)):
            wrong = (right + 1) % LAW.vocabulary_size
            errs = position % self.distance == 0
            siblings = [wrong, right] if errs else [right]
            parents += [node] * len(siblings)
            node = len(token_ids)
            token_ids += siblings
        return CandidateTree(tuple(token_ids), tuple(parents))


def right_before_wrong(job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
    """The right chain, each candidate of it with a wrong sibling."""
    right = list(continuation[: job.draft_length])
    token_ids = [each for token_id in right for each in (token_id, (token_id + 1) % LAW.vocabulary_size)]
    parents = [parent for depth in range(len(right)) for parent in [2 * depth - 2 if depth else ROOT] * 2]
    return CandidateTree(tuple(token_ids), tuple(parents))


class ChaoticDrafter:
    """Takes its time, offers anything, and is now and then right."""

    name = "chaotic"
    context_length = 0

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._known = LawContinuation(LAW)

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        trees = [self._tree(job) for job in jobs]
        time.sleep(self._random.random() * 0.004)
        for job in jobs:
            abandoned(job.sequence_id)
        return trees

    def release(self, sequence_id: str) -> None:
        """Holds nothing."""

    def _tree(self, job: DraftJob) -> CandidateTree:
        draw = self._random
        token_ids: list[int] = []
        parents: list[int] = []
        node = ROOT
        for right in self._known(job)[: draw.randint(0, job.draft_length)]:
            siblings = [right if draw.random() < 0.7 else draw.randrange(LAW.vocabulary_size) for _ in range(job.width)]
            parents += [node] * len(siblings)
            node = len(token_ids)
            token_ids += siblings
        confidences = tuple(draw.random() for _ in token_ids) if draw.random() < 0.5 else ()
        return CandidateTree(tuple(token_ids), tuple(parents), confidences=confidences)


async def _summary(deployment: Deployment, request: GenerationRequest = REQUEST) -> SpeculationSummary:
    """Of an answer whose tokens are those of plain decoding."""
    answer = await deployment.generate(request)
    assert answer.token_ids == plain_output(LAW, request.token_ids, request.sampling, request.max_tokens or 0)
    assert answer.finished is not None
    return answer.finished.speculation


def _many(count: int, temperature: float, max_tokens: int = 40) -> list[GenerationRequest]:
    return [
        replace(
            REQUEST,
            token_ids=(1, i, 3),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=i),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("width", [1, 2])
async def test_misses_become_hits_where_the_runner_up_is_right(width: int) -> None:
    """Of 70 tokens every seventh is a miss. width 2: the runner-up is verified too, and the block behind it hits."""
    drafter = ScriptedDrafter(ErringEvery(7), LawContinuation(LAW))
    config = replace(_config(), width=width)
    async with Deployment([TableModel(LAW, delay=0.03)], [drafter], config) as deployment:
        speculation = await _summary(deployment)
        assert speculation.num_fan_out_hits >= 7
        assert speculation.num_fan_out_misses > 0
        await deployment.idle()


async def test_the_journal_tells_which_of_the_blocks_was_verified() -> None:
    """Several lie on one base length; the one on the log holds the step's first token, or the one before it."""
    steps: list[Step] = []
    drafter = ScriptedDrafter(ErringEvery(7), LawContinuation(LAW))

    def read(entry: Entry) -> None:
        if isinstance(entry, Step):
            steps.append(entry)

    async with Deployment([TableModel(LAW, delay=0.01)], [drafter], _config(), readers=[read]) as deployment:
        speculation = await _summary(deployment)
        assert speculation.num_fan_out_hits > 0
    verified = [step for step in steps if step.num_draft_tokens]
    answer = [token_id for step in steps for token_id in step.token_ids]
    for step in verified:
        assert step.draft is not None
        behind = answer[step.draft.base_length - len(REQUEST.token_ids) : step.position]
        accepted = list(step.token_ids[: step.sources.count(TokenSource.ACCEPTED)])
        assert step.draft.candidates.walk([*behind, *accepted]) is not None


async def test_a_wrong_runner_up_helps_nobody_and_harms_nobody() -> None:
    """The blocks of the tail all hit: what is drafted beside it never gets into it."""
    drafter = ScriptedDrafter(right_before_wrong, LawContinuation(LAW))
    async with Deployment([TableModel(LAW, delay=0.02)], [drafter], _config()) as deployment:
        speculation = await _summary(deployment)
        assert speculation.num_fan_out_hits == speculation.num_ahead_misses == 0
        assert speculation.num_ahead_hits > 8
        assert speculation.num_fan_out_misses > 5


@pytest.mark.parametrize(("window", "fan_out"), [(1, 5), (3, 0)])
async def test_without_a_window_or_unasked_there_are_no_branches(window: int, fan_out: int) -> None:
    drafter = ScriptedDrafter(ErringEvery(7), LawContinuation(LAW))
    async with Deployment([TableModel(LAW, delay=0.002)], [drafter], _config(window, fan_out)) as deployment:
        speculation = await _summary(deployment)
        assert (speculation.num_fan_out_hits, speculation.num_fan_out_misses) == (0, 0)
        assert not any("/" in job_id for job_id in drafter.known)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
async def test_many_sequences_of_a_model_that_errs_equal_plain(temperature: float) -> None:
    """A real drafter, whose KV must follow every branch."""
    small = TableModel(AgreeingLaw(LAW, 0.8))
    model = TableModel(LAW, delay=0.01)
    async with Deployment([model], [ModelDrafter(small)], _config(2, 4)) as deployment:
        answers = await asyncio.gather(*(_summary(deployment, request) for request in _many(4, temperature)))
        assert sum(speculation.num_fan_out_misses for speculation in answers) > 0
        await deployment.idle()
        small.check_integrity()
        assert small.open_sequences == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
async def test_chaos_changes_no_token(seed: int) -> None:
    draw = random.Random(seed)
    window = draw.randint(2, 6)
    config = replace(_config(window, draw.randint(1, 4)), width=draw.randint(1, 3))
    models = [TableModel(LAW, delay=0.02), TableModel(LAW, delay=0.02)]  # which leaves drafters time for branches
    async with Deployment(models, [ChaoticDrafter(seed), TableDrafter(LAW, 0.7)], config) as deployment:
        tasks = [asyncio.create_task(_summary(deployment, request)) for request in _many(8, 0.9)]
        deployment.targets[seed % 2].cut()
        answers = await asyncio.gather(*tasks)
        assert sum(one.num_fan_out_hits + one.num_fan_out_misses for one in answers) > 0
        await deployment.idle()


@pytest.mark.parametrize("rule", [AcceptRule.REJECTION, AcceptRule.BLOCK])
async def test_rules_that_test_ratios_have_no_branches(rule: AcceptRule) -> None:
    request = replace(REQUEST, sampling=SamplingParams(temperature=0.9, accept_rule=rule), max_tokens=40)
    async with Deployment([TableModel(LAW, delay=0.002)], [TableDrafter(LAW, 0.6)], _config()) as deployment:
        answer = await deployment.generate(request)
        assert answer.finished is not None
        assert len(answer.token_ids) == 40
        assert answer.finished.speculation.num_fan_out_misses == 0


def test_the_likeliest_outcomes_come_first() -> None:
    """Sure, unsure, sure: the runner-ups of the second token, then that of the first, whose chance is half of 0.1."""
    doubts = [Doubt((10, 11), 0.9), Doubt((20, 21), 0.5), Doubt((30,), 0.95)]
    assert likeliest(doubts, 7) == [(8, 20), (8, 21), (7, 10), (7, 11), (9, 30)]


def test_doubts_follow_the_likeliest_path_and_narrowing_keeps_it() -> None:
    comb = CandidateTree((1, 2, 3, 4, 5), (ROOT, ROOT, ROOT, 0, 0), confidences=(0.9, 0.9, 0.9, 0.6, 0.6))
    assert doubts_of(comb) == [Doubt((2, 3), 0.9), Doubt((5,), 0.6)]
    assert narrowed(comb, 1) == CandidateTree.chain([1, 4])
    assert narrowed(comb, 1).confidences == (0.9, 0.6)
    assert narrowed(comb, 2) == CandidateTree((1, 2, 4, 5), (ROOT, ROOT, 0, 0))
    assert narrowed(comb, 3) is comb


def _sequence(plan: DraftPlan) -> DraftSequence:
    log = Log(ROOT_DIGEST, (1, 2))
    stop = StopConditions(2, 100, stop_token_ids=frozenset({99}))
    fan_out = FanOut("s", ROOT_DIGEST, b"")
    return DraftSequence("s", 0, Epoch(1, "o"), log, SamplingParams(), stop, plan, fan_out, committed_length=2)


def test_a_branch_becomes_the_tail_only_when_the_target_went_that_way() -> None:
    sequence = _sequence(DraftPlan(2, window=2, fan_out=2))
    sequence.sent(CandidateTree((3, 30, 4, 40), (ROOT, ROOT, 0, 0), confidences=(0.6, 0.6, 0.6, 0.6)), 0.0)
    first, second = sequence.new_branches(8, 9)
    assert (first.log.token_ids, second.log.token_ids) == ([1, 2, 30], [1, 2, 3, 40])
    assert first.log.digest == Log(ROOT_DIGEST, (1, 2, 30)).digest
    first.tree, second.tree = CandidateTree.chain([31, 32]), CandidateTree.chain([41, 42])
    assert sequence.log.token_ids == [1, 2, 3, 4]

    sequence.advance(2, (3, 40))
    assert sequence.log.token_ids == [1, 2, 3, 40, 41, 42]
    assert sequence.log.digest == Log(ROOT_DIGEST, (1, 2, 3, 40, 41, 42)).digest
    assert sequence.in_flight == [6]
    assert sequence.fan_out.branches == []

    sequence.advance(4, (41, 7))
    assert sequence.log.token_ids == [1, 2, 3, 40, 41, 7]
    assert sequence.in_flight == []


def test_a_branch_is_followed_as_far_as_the_target_agrees() -> None:
    sequence = _sequence(DraftPlan(2, window=2, fan_out=2))
    sequence.sent(CandidateTree((3, 30), (ROOT, ROOT)), 0.0)
    (branch,) = sequence.new_branches(8, 9)
    branch.tree = CandidateTree.chain([31, 32])
    sequence.advance(2, (30, 31, 9))
    assert sequence.log.token_ids == [1, 2, 30, 31, 9]
    assert (sequence.in_flight, sequence.committed_length) == ([], 5)


def test_no_branch_behind_the_end_and_none_twice() -> None:
    sequence = _sequence(DraftPlan(1, window=4, fan_out=4))
    sequence.sent(CandidateTree((3, 99, 30), (ROOT, ROOT, ROOT)), 0.0)
    assert [branch.correction for branch in sequence.new_branches(8, 9)] == [30]
    assert sequence.new_branches(8, 9) == []


def test_every_block_has_branches_of_its_own_and_a_target_can_hold_them_all() -> None:
    sequence = _sequence(DraftPlan(2, window=4, fan_out=2))
    for first in (10, 20, 30):
        sequence.sent(CandidateTree((first, 80, 81, first + 1, 82), (ROOT, ROOT, ROOT, 0, 0)), 0.0)
    assert [branch.fork for branch in sequence.new_branches(1, 9)] == [2]
    assert sorted(branch.fork for branch in sequence.new_branches(8, 9)) == [3, 4, 5, 6]
    assert sequence.new_branches(8, 9) == []


def test_hits_and_misses_of_the_fan_out_are_counted_apart() -> None:
    log = Log(ROOT_DIGEST, [1, 2])
    blocks = InFlight(log)
    blocks.forwarded(2, log.digest, CandidateTree.chain([3, 4]))
    for other, fan_out in (((3, 4), False), ((3, 40), True), ((3, 4, 50), True)):
        base = Log(ROOT_DIGEST, (1, 2, *other))
        blocks.forwarded(len(base), base.digest, CandidateTree.chain([5, 6]), fan_out=fan_out)
    log.append([3, 40])
    assert blocks.log_grew() == Outcome(misses=1, fan_out_hits=1, fan_out_misses=1)
    assert blocks.covers
    log.append([5, 6, 7])
    assert blocks.log_grew() == Outcome()
    assert not blocks.covers


def test_what_was_drafted_behind_a_rejection_is_given_up_at_once() -> None:
    log = Log(ROOT_DIGEST, [1, 2])
    blocks = InFlight(log)
    blocks.forwarded(2, log.digest, CandidateTree.chain([3, 4, 5]))
    blocks.forwarded(5, Log(ROOT_DIGEST, (1, 2, 3, 4, 5)).digest, CandidateTree.chain([6]))
    log.append([9])
    assert blocks.log_grew() == Outcome(misses=1)
    assert not blocks.covers
    assert narrowed(EMPTY, 1) is EMPTY
