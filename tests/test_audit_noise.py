"""What the audit calls a near-tie: by a noise that is set, and by the one that a target measured."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scheduler import counters as names
from scheduler.audit import AuditConfig, is_near_tie, largest_near_tie
from scheduler.request import GenerationRequest
from services.metrics import role_metrics
from specdec.params import SamplingParams
from tools.audited import EVERY, LAW, PENALISED, audited, deployment, mixed
from tools.cases import GREEDY, SAMPLED, prompts
from tools.exposition import value
from tools.planted import BatchNoiseModel, Found, forbid_the_winner, shift_verify_rows
from tools.table_model import TableModel


async def test_a_difference_below_the_noise_is_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, found = role_metrics("scheduler"), Found()
    shift_verify_rows(monkeypatch)
    audit = replace(EVERY, noise=1000.0)
    async with deployment(metrics, TableModel(LAW), audit, found) as system:
        await system.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=20))
        outcomes = await audited(metrics, 1)

    assert outcomes == {"near_tie": 1}
    assert found.mismatches == []
    assert value(metrics, names.AUDIT_MISMATCHES) == 0


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, replace(SAMPLED, top_p=1.0), replace(PENALISED, top_p=1.0)],
    ids=["greedy", "sampled", "penalised"],
)
async def test_measured_noise_tells_a_near_tie_from_a_fault(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In logits, as the target measures it: the margin at the difference is one of log p + g, or of logits that a
    penalty has scaled. Without a filter, at whose edge so much noise would let other tokens in."""

    async def outcome(numeric_noise: float, audit: AuditConfig = EVERY) -> str:
        metrics, model = role_metrics("scheduler"), TableModel(LAW)
        model.numeric_noise = numeric_noise
        async with deployment(metrics, model, audit, found) as system:
            await system.generate(GenerationRequest((1, 2, 3), sampling, max_tokens=12))
            (what,) = (await audited(metrics, 1)).keys()
        return what

    found = Found()
    forbid_the_winner(monkeypatch, position=8)
    assert await outcome(0.0) == "mismatch"
    margin = found.mismatches[0].difference.margin
    assert margin
    logits = margin * (sampling.temperature or 1.0) / sampling.repetition_penalty

    assert await outcome(logits * 0.999) == "mismatch"  # the difference is just above the noise
    assert found.mismatches[1].noise == pytest.approx(margin * 0.999)
    assert await outcome(logits * 1.001) == "near_tie"
    assert await outcome(logits * 1.001, replace(EVERY, noise=0.0)) == "mismatch"  # a noise that is set holds
    assert await outcome(0.0, replace(EVERY, noise=logits * 1.001)) == "near_tie"


@pytest.mark.parametrize("told", [True, False])
async def test_it_is_silent_over_honest_answers_of_a_target_with_noise(told: bool) -> None:
    """Which would be mismatches, if the target had not told of it."""
    metrics = role_metrics("scheduler")
    model = BatchNoiseModel(LAW, amount=0.1)
    if not told:
        model.numeric_noise = 0.0
    async with deployment(metrics, model) as system:
        await asyncio.gather(*(system.generate(request) for request in mixed(16)))
        outcomes = await audited(metrics, 16)

    assert outcomes.keys() - {"equal"} == {"near_tie" if told else "mismatch"}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_fault_is_found_on_a_target_with_noise(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = role_metrics("scheduler")
    shift_verify_rows(monkeypatch)
    async with deployment(metrics, BatchNoiseModel(LAW, amount=0.005)) as system:
        for prompt in prompts(4):
            await system.generate(GenerationRequest(prompt, sampling, max_tokens=20))
        assert (await audited(metrics, 4)).get("mismatch", 0) >= 1


@pytest.mark.parametrize(
    ("margin", "noise", "near"),
    [(0.5, 0.4, False), (0.5, 0.5, True), (0.5, 0.6, True), (0.0, 0.0, False), (0.0, 0.1, True), (None, 9.0, False)],
)
def test_a_near_tie_is_won_by_no_more_than_the_noise(margin: float | None, noise: float, near: bool) -> None:
    assert is_near_tie(margin, noise) is near


@pytest.mark.parametrize(
    ("sampling", "largest"),
    [
        (GREEDY, 0.5),
        (replace(GREEDY, temperature=0.25), 2.0),
        (replace(GREEDY, repetition_penalty=2.0), 1.0),
        (replace(GREEDY, temperature=2.0, repetition_penalty=0.5), 0.5),
    ],
)
def test_noise_of_logits_is_turned_into_that_of_margins(sampling: SamplingParams, largest: float) -> None:
    assert largest_near_tie(0.5, sampling) == largest
