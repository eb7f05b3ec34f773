"""Metrics: counts are those of the script, never fall, never make a rate above 1, and have few labels."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from draft_worker.config import DraftConfig
from scheduler import counters as names
from scheduler.counters import MAX_POSITION, METRICS, Kind
from scheduler.errors import ModelNotFound, SequenceFailed
from scheduler.request import GenerationRequest, Tokens
from services.metrics import documentation, process_metrics, render, role_metrics
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_exposition import Exposition, prometheus_name
from specdec.messages import TargetResult
from tools.cases import GREEDY, SAMPLED, prompts, total
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.exposition import Samples, by_label, count, exposed, samples, value
from tools.process import SECRET
from tools.scripted import (
    FailingDrafter,
    Longer,
    RandomTree,
    Script,
    ScriptedDrafter,
    Spoiled,
    WrongFrom,
    empty,
    oracle,
)
from tools.table_law import TableLaw
from tools.table_model import Fault, FaultKind, TableModel

LAW = TableLaw()
CONTINUATION = LawContinuation(LAW)
VOCABULARY = LAW.vocabulary_size
ROOT = Path(__file__).parents[1]
RISING = ("counter", "histogram")


def deployment(metrics: Metrics, script: Script | None, draft_length: int = 4) -> Deployment:
    drafts = [] if script is None else [ScriptedDrafter(script, CONTINUATION)]
    return Deployment([TableModel(LAW)], drafts, quick_config(draft_length), counters=metrics)


def request(prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 50) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), GREEDY, max_tokens=max_tokens)


async def test_an_oracle_counts_every_candidate_as_accepted() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, oracle) as system:
        await system.generate(request(max_tokens=50))

    assert value(metrics, names.NUM_DRAFTS) == 10
    assert value(metrics, names.NUM_DRAFT_TOKENS) == 40
    assert value(metrics, names.NUM_ACCEPTED_TOKENS) == 40
    assert by_label(metrics, names.NUM_ACCEPTED_TOKENS_PER_POS) == {"0": 10, "1": 10, "2": 10, "3": 10}
    assert by_label(metrics, names.MODE) == {"speculative": 10}
    assert value(metrics, names.GENERATION_TOKENS) == 50


async def test_an_anti_draft_counts_nothing_as_accepted() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, WrongFrom(0, VOCABULARY)) as system:
        await system.generate(request(max_tokens=10))

    # 4 candidates each with 10 to 5 tokens to go, then 3, 2, 1, and the last token needs none.
    assert value(metrics, names.NUM_DRAFT_TOKENS) == 6 * 4 + 3 + 2 + 1
    assert value(metrics, names.NUM_ACCEPTED_TOKENS) == 0
    assert by_label(metrics, names.NUM_ACCEPTED_TOKENS_PER_POS) == {}
    assert by_label(metrics, names.MODE) == {"speculative": 9, "plain": 1}


async def test_a_half_right_draft_counts_positions_up_to_the_wrong_one() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, WrongFrom(2, VOCABULARY)) as system:
        await system.generate(request(max_tokens=30))

    # Rounds of 3 tokens; with 3 to go two candidates are left, both right.
    assert value(metrics, names.NUM_DRAFTS) == 10
    assert value(metrics, names.NUM_DRAFT_TOKENS) == 9 * 4 + 2
    assert by_label(metrics, names.NUM_ACCEPTED_TOKENS_PER_POS) == {"0": 10, "1": 10}


async def test_without_drafts_everything_is_zero_and_a_number() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, None) as system:
        await system.generate(request(max_tokens=7))

    assert value(metrics, names.NUM_DRAFTS) == value(metrics, names.NUM_DRAFT_TOKENS) == 0
    assert by_label(metrics, names.MODE) == {"plain": 7}
    assert "nan" not in exposed(metrics).lower()


async def test_metrics_are_the_sums_of_what_each_answer_tells() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, RandomTree(3, VOCABULARY)) as system:
        requests = [replace(request(prompt), sampling=SAMPLED, max_tokens=25) for prompt in prompts(24)]
        answers = await asyncio.gather(*(system.generate(one) for one in requests))

    summed = total(answers)
    assert value(metrics, names.NUM_DRAFTS) == summed.num_drafts > 0
    assert value(metrics, names.NUM_DRAFT_TOKENS) == summed.num_draft_tokens
    assert value(metrics, names.NUM_ACCEPTED_TOKENS) == summed.num_accepted_tokens > 0
    assert value(metrics, names.MODE, "plain") == summed.num_plain_steps
    assert value(metrics, names.GENERATION_TOKENS) == sum(len(answer.token_ids) for answer in answers)
    assert sum(by_label(metrics, names.NUM_ACCEPTED_TOKENS_PER_POS).values()) == summed.num_accepted_tokens


@pytest.mark.parametrize(
    "script",
    [oracle, WrongFrom(1, VOCABULARY), empty, Longer(5), Spoiled(-1), Spoiled(2**31 - 1), RandomTree(3, VOCABULARY)],
    ids=lambda script: str(getattr(script, "__name__", script)),
)
async def test_counters_never_fall_and_rates_stay_within_one(script: Script) -> None:
    """With odd drafts, results told twice, a target that is lost on the way, and clients that leave."""
    metrics = role_metrics("scheduler")
    before = samples(metrics, RISING)
    async with deployment(metrics, script) as system:
        system.targets[0].meddle = twice
        for i, prompt in enumerate(prompts(6)):
            if i == 3:
                system.targets[0].cut()
            if i % 2:
                async with aclosing(system.scheduler.generate(request(prompt))) as events:
                    async for event in events:
                        if isinstance(event, Tokens):
                            break
            else:
                await system.generate(request(prompt))
            before = risen(before, metrics)


def twice(results: list[TargetResult]) -> list[TargetResult]:
    return [result for result in results for _ in range(2)]


def risen(before: Samples, metrics: Metrics) -> Samples:
    now = samples(metrics, RISING)
    assert before
    assert all(now[key] >= earlier >= 0 for key, earlier in before.items())
    assert 0 <= value(metrics, names.NUM_ACCEPTED_TOKENS) <= value(metrics, names.NUM_DRAFT_TOKENS)
    return now


async def test_deep_positions_share_a_label() -> None:
    metrics = role_metrics("scheduler")
    config = replace(quick_config(60), max_draft_length=60)
    draft_config = DraftConfig("draft", SECRET, max_draft_length=60)
    drafter = ScriptedDrafter(oracle, CONTINUATION)
    async with Deployment([TableModel(LAW)], [drafter], config, draft_config=draft_config, counters=metrics) as system:
        await system.generate(request(max_tokens=120))

    positions = by_label(metrics, names.NUM_ACCEPTED_TOKENS_PER_POS)
    assert set(positions) == {*map(str, range(MAX_POSITION)), f"{MAX_POSITION}+"}
    assert sum(positions.values()) == value(metrics, names.NUM_ACCEPTED_TOKENS)


async def test_no_label_comes_from_a_user() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, oracle) as system:
        for i in range(20):
            with pytest.raises(ModelNotFound):
                await system.generate(replace(request(), model=f"canary-{i}"))
        await system.generate(replace(request(), request_id="canary"))

    assert "canary" not in exposed(metrics)
    assert count(metrics, names.REQUEST_DURATION, error_type="ModelNotFound") == 20


async def test_a_late_drafter_is_a_fallback_and_its_wait_is_counted() -> None:
    metrics = role_metrics("scheduler")
    drafter = ScriptedDrafter(oracle, CONTINUATION)
    drafter.gate.clear()
    config = replace(quick_config(), draft_timeout=0.05, min_draft_patience=0.05)
    async with Deployment([TableModel(LAW)], [drafter], config, counters=metrics) as system:
        answer = await system.generate(request(max_tokens=300))
        drafter.gate.set()

    assert answer.finished is not None
    assert by_label(metrics, names.FALLBACK) == answer.finished.speculation.fallbacks
    assert by_label(metrics, names.FALLBACK)["late"] >= 1
    assert value(metrics, names.DRAFT_WAIT) >= 0.05


async def test_a_failing_drafter_is_a_fallback() -> None:
    metrics = role_metrics("scheduler")
    drafter = FailingDrafter(ScriptedDrafter(oracle, CONTINUATION))
    async with Deployment([TableModel(LAW)], [drafter], quick_config(), counters=metrics) as system:
        await system.generate(request())

    assert by_label(metrics, names.FALLBACK).get("failed", 0) >= 1


@pytest.mark.parametrize("script", [oracle, WrongFrom(2, VOCABULARY)], ids=["hits", "misses"])
async def test_blocks_drafted_ahead_are_hits_or_misses_and_those_on_another_way_are_stale(script: Script) -> None:
    metrics = role_metrics("scheduler")
    drafter = ScriptedDrafter(script, CONTINUATION)
    config = replace(quick_config(), window=3)
    async with Deployment([TableModel(LAW, delay=0.005)], [drafter], config, counters=metrics) as system:
        answer = await system.generate(request(max_tokens=100))

    assert answer.finished is not None
    figures = answer.finished.speculation
    assert value(metrics, names.AHEAD_HITS) == figures.num_ahead_hits
    assert value(metrics, names.AHEAD_MISSES) == figures.num_ahead_misses
    assert value(metrics, names.STALE_BLOCKS) == figures.num_stale_blocks
    if script is oracle:
        assert figures.num_ahead_hits > 0
    else:
        assert figures.num_ahead_misses > 0
        assert figures.num_stale_blocks > 0


async def test_a_lost_target_is_a_failover() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, oracle) as system:
        tokens = 0
        async for event in system.scheduler.generate(request(max_tokens=40)):
            if isinstance(event, Tokens) and tokens == 0:
                tokens = len(event.token_ids)
                system.targets[0].cut()

    assert value(metrics, names.FAILOVERS) == 1
    assert value(metrics, names.GENERATION_TOKENS) == 40


async def test_durations_are_told_by_what_ended_the_request() -> None:
    metrics = role_metrics("scheduler")
    model = TableModel(LAW, faults=[Fault(FaultKind.NAN, marker=9)])
    async with Deployment([model], counters=metrics) as system:
        await system.generate(request(max_tokens=5))
        await system.generate(request(max_tokens=1))
        with pytest.raises(SequenceFailed):
            await system.generate(request((9, 9)))
        async with aclosing(system.scheduler.generate(request())) as events:
            await anext(events)

    assert count(metrics, names.REQUEST_DURATION, gen_ai_request_model="table") == 4
    assert count(metrics, names.REQUEST_DURATION, error_type="") == 2
    assert count(metrics, names.REQUEST_DURATION, error_type="SequenceFailed") == 1
    assert count(metrics, names.REQUEST_DURATION, error_type="cancelled") == 1
    assert count(metrics, names.TIME_TO_FIRST_TOKEN) == 2
    assert count(metrics, names.TIME_PER_OUTPUT_TOKEN) == 1  # an answer of one token has no time behind its first


def test_counters_are_there_from_the_start() -> None:
    """Else a rate over the first change is lost, and an alarm on a mismatch never sees it rise."""
    shown = {name for name, _ in samples(role_metrics("scheduler"), ("counter",))}
    expected = {prometheus_name(m) for m in METRICS if m.kind is Kind.COUNTER and m.known}

    assert shown == expected
    assert "outrider_spec_decode_audit_mismatches_total" in shown


def test_names_are_those_that_others_made_common() -> None:
    shown = {prometheus_name(metric) for metric in METRICS}

    for suffix in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"):
        assert f"outrider_spec_decode_{suffix}_total" in shown
    for suffix in (
        "ahead_hits",
        "ahead_misses",
        "stale_blocks",
        "fallback",
        "mode",
        "draft_wait_seconds",
        "failovers",
        "audit_mismatches",
    ):
        assert f"outrider_spec_decode_{suffix}_total" in shown
    assert {name for name in shown if name.startswith("gen_ai_server_")} == {
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
    }


def test_the_page_of_metrics_is_that_of_the_code() -> None:
    """`python -m services.metrics > docs/metrics.md` makes it anew."""
    assert (ROOT / "docs" / "metrics.md").read_text() == documentation()


def test_every_metric_on_the_page_is_shown_under_that_name() -> None:
    metrics = role_metrics("scheduler")
    for metric in METRICS:
        labels = ("x",) * len(metric.labels)
        if metric.kind is Kind.GAUGE:
            metrics.watch(metric, lambda labels=labels: {labels: 1.0})  # type: ignore[misc]
        else:
            (metrics.add if metric.kind is Kind.COUNTER else metrics.observe)(metric, 1.0, *labels)
    text = exposed(metrics)

    assert all(f"# TYPE {prometheus_name(metric)} {metric.kind.value}\n" in text for metric in METRICS)


def test_the_process_shows_its_own_metrics() -> None:
    process_metrics().add(names.STALE_BLOCKS)

    assert b"outrider_spec_decode_stale_blocks_total" in render()[0]


async def test_a_sampled_request_is_the_exemplar_of_its_times_and_an_unsampled_one_is_none() -> None:
    metrics = role_metrics("scheduler")
    async with deployment(metrics, None) as system:
        for trace_id, flag in (("ab" * 16, "01"), ("ef" * 16, "00")):
            await system.generate(replace(request(max_tokens=3), traceparent=f"00-{trace_id}-{'cd' * 8}-{flag}"))
    text = Exposition(metrics).render("application/openmetrics-text; version=1.0.0")[0].decode()
    exemplified = {line.split("{")[0] for line in text.splitlines() if f'trace_id="{"ab" * 16}"' in line}

    assert exemplified == {
        f"{prometheus_name(metric)}_bucket"
        for metric in (names.QUEUE_TIME, names.REQUEST_DURATION, names.TIME_TO_FIRST_TOKEN, names.TIME_PER_OUTPUT_TOKEN)
    }
    assert "ef" * 16 not in text
