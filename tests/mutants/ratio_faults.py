"""Faults of the rules that test ratios: in what the target worker calls, and in what the drafter draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.accept import draw_from
from specdec.candidates import ROOT, DraftLaw
from specdec.law import Law
from specdec.params import SamplingParams, StopConditions
from specdec.ratio import draw_candidate
from tools.law_seams import ACCEPT_BLOCK, ACCEPT_REJECTION, DRAW_CANDIDATE, RESIDUAL, TARGET_LAW

Plant = Callable[[pytest.MonkeyPatch], None]


def target_for_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn from the target's law."""
    RESIDUAL.plant(monkeypatch, lambda _: lambda weight, law, ids, probs: law)


def absolute_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """|p - q| for max(p - q, 0)."""

    def faulty(weight: Tensor, law: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        left = (weight[:, None] * law).scatter_add(-1, ids, -probs).abs()
        return left / left.sum(dim=-1, keepdim=True)

    RESIDUAL.plant(monkeypatch, lambda _: faulty)


def residual_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """`block` draws its correction as `rejection` does."""
    RESIDUAL.plant(monkeypatch, lambda real: lambda weight, *rest: real(torch.ones_like(weight), *rest))


def greedy_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter takes the likeliest token and sends the law all the same."""
    DRAW_CANDIDATE.plant(monkeypatch, lambda _: lambda law, uniform: law.token_ids[0])


def _drawn_from(change: Callable[[DraftLaw], DraftLaw]) -> Plant:
    """The drafter draws from another law than it sends."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        other = lru_cache(maxsize=None)(change)
        DRAW_CANDIDATE.plant(monkeypatch, lambda _: lambda law, uniform: draw_candidate(other(law), uniform))

    return plant


def _hotter(law: DraftLaw) -> DraftLaw:
    weights = torch.tensor(law.weights, dtype=torch.float64) ** (1 / 1.3)
    return DraftLaw(law.token_ids, tuple((weights / weights.sum() * 2**20).round().clamp(min=1).long().tolist()))


def _bf16(law: DraftLaw) -> DraftLaw:
    return DraftLaw(law.token_ids, tuple(torch.tensor(law.weights).bfloat16().long().tolist()))


other_temperature = _drawn_from(_hotter)
without_top_k = _drawn_from(lambda law: DraftLaw(law.token_ids[:5], law.weights[:5]))
bf16_draw = _drawn_from(_bf16)


def verified_with(**changes: Any) -> Plant:
    """The target worker verifies under other parameters than were asked for; the drafter uses the right ones."""

    class FaultyLaw(Law):
        def __init__(self, params: SamplingParams, stop: StopConditions, log: Sequence[int], mask: Any = None) -> None:
            super().__init__(replace(params, **changes), stop, log, mask)

    return lambda monkeypatch: TARGET_LAW.plant(monkeypatch, lambda _: FaultyLaw)


def row_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate is judged by the row behind it."""

    def wrap(real: Any) -> Any:
        return lambda parents, tokens, ids, probs, target, *chances: real(
            parents, tokens, ids, probs, target.roll(-1, dims=1), *chances
        )

    ACCEPT_REJECTION.plant(monkeypatch, wrap)


def stale_draft_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate is judged by the draft law of the one before."""

    def wrap(real: Any) -> Any:
        def faulty(parents: Any, tokens: Tensor, ids: Tensor, probs: Tensor, *rest: Any) -> Any:
            before = [max(i - 1, 0) for i in range(tokens.shape[1])]
            return real(parents, tokens, ids[:, before], probs[:, before], *rest)

        return faulty

    ACCEPT_REJECTION.plant(monkeypatch, wrap)


def doubtful_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is cut before the first candidate that the drafter gave less than 0.1."""

    def wrap(real: Any) -> Any:
        def faulty(
            parents: Sequence[int],
            tokens: Tensor,
            ids: Tensor,
            probs: Tensor,
            target: Tensor,
            tests: Tensor,
            draws: Tensor,
        ) -> tuple[Tensor, Tensor]:
            own = (probs * (ids == tokens[:, :, None])).sum(dim=-1)
            kept = (own >= 0.1).long().cumprod(dim=-1).sum(dim=-1)
            node, token_id = torch.full((len(tokens),), ROOT), draw_from(target[:, 0], draws)
            for count in range(1, len(parents) + 1):
                rows = kept == count
                node[rows], token_id[rows] = real(
                    parents[:count],
                    tokens[rows, :count],
                    ids[rows, :count],
                    probs[rows, :count],
                    target[rows, : count + 1],
                    tests[rows, :count],
                    draws[rows],
                )
            return node, token_id

        return faulty

    ACCEPT_REJECTION.plant(monkeypatch, wrap)


def block_row_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `row_shifted`, in `block`."""

    def wrap(real: Any) -> Any:
        return lambda tokens, ids, probs, target, *chances: real(tokens, ids, probs, target.roll(-1, dims=1), *chances)

    ACCEPT_BLOCK.plant(monkeypatch, wrap)
