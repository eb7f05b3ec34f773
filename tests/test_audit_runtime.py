"""The audit: it finds planted faults of the speculative path, is silent over honest answers, and gives way to work."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler import counters as names
from scheduler.audit import NO_AUDIT, AuditCase, Difference, compare
from scheduler.request import Finished, GenerationRequest, SpeculationSummary
from scheduler.scheduler import Scheduler
from services.metrics import role_metrics
from specdec.commit import FinishReason
from specdec.drafters.ngram import NgramDrafter
from specdec.messages import Identity, Role, TargetOpen
from specdec.params import AcceptRule, SamplingParams, StopConditions
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.audited import EVERY, LAW, PENALISED, EndsAt, audited, deployment, mixed
from tools.cases import GREEDY, SAMPLED, prompts
from tools.deployment import Deployment, DraftSpec, quick_config
from tools.exposition import by_label, samples, value
from tools.identities import draft_identity
from tools.network import Endpoint, Network
from tools.planted import Found, StaleKvModel, shift_verify_rows
from tools.process import SECRET
from tools.real_system import patient_config, real_runner
from tools.recorder import MemoryRecorder
from tools.table_model import TableModel
from tools.waiting import until


async def test_it_is_silent_over_two_hundred_honest_answers() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW)) as system:
        await asyncio.gather(*(system.generate(request) for request in mixed(200)))
        outcomes = await audited(metrics, 200)

    assert outcomes == {"equal": 200}
    assert value(metrics, names.AUDIT_MISMATCHES) == 0
    assert value(metrics, names.NUM_ACCEPTED_TOKENS) > 200


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
async def test_it_finds_rows_of_a_verify_that_are_shifted(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, found = role_metrics("scheduler"), Found()
    shift_verify_rows(monkeypatch)
    async with deployment(metrics, TableModel(LAW), found=found) as system:
        request = GenerationRequest((1, 2, 3), sampling, max_tokens=20)
        answer = await system.generate(request)
        outcomes = await audited(metrics, 1)
        monkeypatch.undo()
        honest = await system.plain(request)
        await system.idle()

    assert outcomes == {"mismatch": 1}
    assert value(metrics, names.AUDIT_MISMATCHES) == 1
    difference = found.mismatches[0].difference
    assert tuple(answer.token_ids) == found.mismatches[0].case.token_ids
    assert answer.token_ids[: difference.position] == honest.token_ids[: difference.position]
    assert difference.served == answer.token_ids[difference.position]
    assert difference.plain == honest.token_ids[difference.position]
    assert difference.margin is not None
    assert difference.margin > 0


async def test_it_finds_kv_of_a_rejected_candidate() -> None:
    metrics, found = role_metrics("scheduler"), Found()
    async with deployment(metrics, StaleKvModel(LAW), found=found, agreement=0.5) as system:
        for prompt in prompts(5):
            await system.generate(GenerationRequest(prompt, GREEDY, max_tokens=30))
        outcomes = await audited(metrics, 5)

    assert outcomes == {"mismatch": 5}


async def test_a_replay_shares_no_kv_with_what_was_served() -> None:
    """A row that the faulty path wrote would make it agree with the wrong answer."""
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW)) as system:
        request = GenerationRequest(tuple(range(40)), GREEDY, max_tokens=20)
        await system.generate(request)
        await audited(metrics, 1)
        assert system.targets[0].worker.load().prefix_hit_tokens == 0
        await system.generate(request)
        assert system.targets[0].worker.load().prefix_hit_tokens > 0


async def test_it_waits_until_the_target_is_idle() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW)) as system:
        running = system.scheduler.generate(GenerationRequest((4, 5), GREEDY, max_tokens=400))
        await anext(running)  # and is not read on, so that it stays open
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=10))
        opened = opens(system)
        await asyncio.sleep(5 * EVERY.poll)
        assert opens(system) == opened
        assert by_label(metrics, names.AUDITS) == {}
        await running.aclose()
        assert await audited(metrics, 1) == {"equal": 1}


def opens(system: Deployment) -> int:
    return sum(isinstance(item.body, TargetOpen) for item in system.targets[0].items)


async def test_a_sequence_of_another_scheduler_is_work_too() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW)) as system:
        other = Scheduler(replace(quick_config(), scheduler_id="other"), system.network.make_link, MemoryRecorder())
        other.add_worker(Role.TARGET, "target-0")
        await until(lambda: other.ready, "the other scheduler is ready")
        running = other.generate(GenerationRequest((4, 5), GREEDY, max_tokens=400))
        await anext(running)
        await until(lambda: system.targets[0].worker.load().sequences == 1, "it is open")
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=10))
        await asyncio.sleep(5 * EVERY.poll)
        assert by_label(metrics, names.AUDITS) == {}
        await running.aclose()
        assert await audited(metrics, 1) == {"equal": 1}
        await other.close()


async def test_work_ends_a_replay_at_once() -> None:
    metrics = role_metrics("scheduler")
    model = TableModel(LAW)
    async with deployment(metrics, model) as system:
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=300))
        model.delay = 0.01  # 3 s to replay it
        await until(lambda: opens(system) > 1, "the replay is open")
        answer = await system.generate(GenerationRequest((7, 8), GREEDY, max_tokens=5))
        outcomes = await audited(metrics, 1)
        model.delay = 0.0
        await audited(metrics, 2)
        await system.idle()

    assert outcomes == {"abandoned": 1}
    assert len(answer.token_ids) == 5


async def test_work_of_another_scheduler_ends_a_replay_too() -> None:
    metrics = role_metrics("scheduler")
    model = TableModel(LAW)
    async with deployment(metrics, model) as system:
        other = Scheduler(replace(quick_config(), scheduler_id="other"), system.network.make_link, MemoryRecorder())
        other.add_worker(Role.TARGET, "target-0")
        await until(lambda: other.ready, "the other scheduler is ready")
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=300))
        model.delay = 0.01  # 3 s to replay it
        await until(lambda: opens(system) > 1, "the replay is open")
        running = other.generate(GenerationRequest((4, 5), GREEDY, max_tokens=400))
        await anext(running)
        assert await audited(metrics, 1) == {"abandoned": 1}
        model.delay = 0.0
        await running.aclose()
        await other.close()


async def test_what_does_not_fit_into_the_queue_is_dropped() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW), replace(EVERY, queue=2)) as system:
        running = system.scheduler.generate(GenerationRequest((4, 5), GREEDY, max_tokens=400))
        await anext(running)
        for prompt in prompts(5):
            await system.generate(GenerationRequest(prompt, GREEDY, max_tokens=10))
        assert by_label(metrics, names.AUDITS) == {"dropped": 3}
        await running.aclose()
        assert await audited(metrics, 5) == {"dropped": 3, "equal": 2}


async def test_a_replay_moves_no_other_metric_and_leaves_no_record() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW)) as system:
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=10))
        before = samples(metrics)
        await audited(metrics, 1)
        await system.idle()
        moved = {name for (name, labels), now in samples(metrics).items() if before.get((name, labels)) != now}
        recorded = len(system.recorder.last)

    assert moved <= {"outrider_audits_total"}
    assert recorded == 1


@pytest.mark.parametrize("rule", [AcceptRule.REJECTION, AcceptRule.BLOCK])
async def test_only_invariant_answers_are_audited(rule: AcceptRule) -> None:
    """The others depend on what was drafted."""
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW)) as system:
        await system.generate(GenerationRequest((1, 2), replace(SAMPLED, accept_rule=rule), max_tokens=10))
        await system.generate(GenerationRequest((1, 2), SAMPLED, max_tokens=10))
        assert await audited(metrics, 1) == {"equal": 1}


async def test_a_share_of_the_answers_is_audited() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW), replace(EVERY, share=0.5)) as system:
        requests = [GenerationRequest(prompt, GREEDY, max_tokens=3) for prompt in prompts(100)]
        await asyncio.gather(*(system.generate(request) for request in requests))
        chosen = len(system.scheduler._auditor._waiting)  # none is replayed before the last answer has ended

    assert 20 <= chosen + sum(by_label(metrics, names.AUDITS).values()) <= 80  # 6 standard deviations


async def test_without_a_share_nothing_is_replayed() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, TableModel(LAW), NO_AUDIT) as system:
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=10))
        await asyncio.sleep(5 * EVERY.poll)
        assert opens(system) == 1
    assert by_label(metrics, names.AUDITS) == {}


async def test_a_target_that_is_lost_during_a_replay_harms_nothing() -> None:
    metrics = role_metrics("scheduler")
    model = TableModel(LAW)
    async with deployment(metrics, model) as system:
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=200))
        model.delay = 0.01
        await until(lambda: opens(system) > 1, "the replay is open")
        system.targets[0].cut()
        model.delay = 0.0
        assert await audited(metrics, 1) == {"abandoned": 1}
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=5))
        assert await audited(metrics, 2) == {"abandoned": 1, "equal": 1}


@pytest.mark.parametrize("content", [False, True])
async def test_the_log_holds_the_prompt_only_if_it_is_told_to(
    content: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, found = role_metrics("scheduler"), Found()
    shift_verify_rows(monkeypatch)
    caplog.set_level(logging.INFO)
    async with deployment(metrics, TableModel(LAW), replace(EVERY, log_content=content), found) as system:
        sampling = replace(SAMPLED, seed=987654321)
        await system.generate(GenerationRequest((61, 62, 63), sampling, max_tokens=20))
        await audited(metrics, 1)
        await until(lambda: bool(found.mismatches), "it was told")
        await until(lambda: "remembered" in caplog.text, "it was logged")

    assert "seed 987654321" in caplog.text
    assert found.mismatches[0].case.sequence_id in caplog.text
    assert ("[61, 62, 63]" in caplog.text) is content


def case(token_ids: tuple[int, ...], reason: FinishReason, text_ends: bool = False) -> AuditCase:
    watcher = EndsAt(len(token_ids)) if text_ends else None
    request = GenerationRequest((1, 2), stop_token_ids=frozenset({9}), watcher=watcher)
    stop = StopConditions(2, 22, 0, frozenset({9}))
    finished = Finished(reason, 2, len(token_ids), SpeculationSummary(), 1.0, 0.1)
    return AuditCase("s", request, stop, token_ids, finished, "target-0")


@pytest.mark.parametrize(
    ("served", "reason", "plain", "plain_reason", "difference"),
    [
        ((5, 6), FinishReason.LENGTH, (5, 6), FinishReason.LENGTH, None),
        ((5, 6, 7), FinishReason.LENGTH, (5, 6), None, None),
        ((5, 6, 7), FinishReason.LENGTH, (5, 8), None, Difference(1, 6, 8, 0.5)),
        ((5, 9, 7), FinishReason.LENGTH, (5, 9), FinishReason.STOP, Difference(2, 7, None, None)),
        ((5, 6), FinishReason.STOP, (5, 6, 7), None, Difference(2, None, 7, None)),
        ((5, 9), FinishReason.LENGTH, (5, 9), FinishReason.STOP, Difference(2, None, None, None)),
    ],
    ids=["equal", "equal so far", "token", "ran past a stop", "ended early", "finish reason"],
)
def test_answers_are_compared_to_their_ends(
    served: tuple[int, ...],
    reason: FinishReason,
    plain: tuple[int, ...],
    plain_reason: FinishReason | None,
    difference: Difference | None,
) -> None:
    assert compare(case(served, reason), plain, [0.5] * len(plain), plain_reason) == difference


def test_an_answer_that_its_text_ended_is_compared_up_to_there() -> None:
    ended = case((5, 6), FinishReason.STOP, text_ends=True)

    assert ended.replay_stop.max_length == 4
    assert compare(ended, (5, 6), (0.5, 0.5), FinishReason.LENGTH) is None


def test_a_stop_token_is_no_end_of_the_text() -> None:
    """Else a target that stops one token late would not be seen."""
    ended = case((5, 9), FinishReason.STOP, text_ends=True)

    assert ended.replay_stop == ended.stop


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16"])
async def test_on_a_real_model_it_is_silent_until_a_fault_is_planted(
    smollm2: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, found = role_metrics("scheduler"), Found()
    runner = await asyncio.to_thread(real_runner, smollm2, dtype)
    identity = Identity(
        "target", Role.TARGET, runner.name, runner.vocabulary_size, "sha256", context_length=runner.context_length
    )
    target = TargetWorker(TargetConfig("target", SECRET), runner, identity)
    network = Network()
    network.add(Endpoint("target", target))
    target.start()
    async with Deployment([], [DraftSpec(NgramDrafter(1, 4), draft_identity("draft"))]) as drafts:
        network.add(drafts.drafts[0])
        scheduler = Scheduler(patient_config(), network.make_link, MemoryRecorder(), metrics, EVERY, found)
        await scheduler.start()
        scheduler.add_worker(Role.TARGET, "target")
        scheduler.add_worker(Role.DRAFT, "draft-0")
        await until(lambda: scheduler.ready, "ready")
        words = (504, 2365, 282, 260, 1837, 314) * 3  # repeats itself, so that the lookup proposes
        for sampling in (GREEDY, replace(SAMPLED, temperature=0.3)):
            await drain(scheduler, GenerationRequest(words, sampling, max_tokens=16))
        assert await audited(metrics, 2) == {"equal": 2}
        assert value(metrics, names.NUM_DRAFTS) > 0
        shift_verify_rows(monkeypatch)
        await drain(scheduler, GenerationRequest(words, GREEDY, max_tokens=16))
        assert (await audited(metrics, 3)).get("mismatch") == 1
        await scheduler.close()
    await asyncio.to_thread(target.stop)


async def drain(scheduler: Scheduler, request: GenerationRequest) -> None:
    async for _ in scheduler.generate(request):
        pass
