"""Faults of `invariant`, and of the law that follows the position inside a block."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.accept import Accepted, accepted_path
from specdec.candidates import ROOT, CandidateTree
from tools.law_seams import ACCEPT_INVARIANT, RANDOM_SEED, RANDOM_WORDS, ROW_LAW


def noise_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two neighbouring positions share their noise."""

    def wrap(real: Any) -> Any:
        def faulty(seed: int, position: int, token_ids: Any) -> Any:
            return real(seed, position // 2 * 2, token_ids)

        return faulty

    RANDOM_WORDS.plant(monkeypatch, wrap)


def one_noise_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request without a seed gets the same one."""
    RANDOM_SEED.plant(monkeypatch, lambda _: SimpleNamespace(randbits=lambda bits: 7))


def accept_without_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first branch is accepted, whatever the target draws."""

    def faulty(candidates: CandidateTree, target_tokens: Sequence[int]) -> Accepted:
        node = ROOT
        while children := candidates.children(node):
            node = children[0]
        return accepted_path(candidates, node, target_tokens[1 + node])

    ACCEPT_INVARIANT.plant(monkeypatch, lambda _: faulty)


def block_has_one_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties and bad words of every row count the log only, not the candidates before it."""
    ROW_LAW.plant(monkeypatch, lambda real: lambda law, row, path: real(law, row, ()))
