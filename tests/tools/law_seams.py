"""Which functions the workers call to draw, judge and decide, each under the name by which its caller finds it.

The draws of the statistical tests go through them, and mutants are planted in them: what a mutant breaks is what the
worker would do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Seam:
    """The attribute `name` of `module`, or of a class in it (MODULE:CLASS), looked up at each call."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __call__(self, *arguments: Any) -> Any:
        return self.now(*arguments)

    @property
    def now(self) -> Any:
        return getattr(self._owner, self.name)

    @property
    def _owner(self) -> Any:
        module, _, owner = self.module.partition(":")
        return getattr(importlib.import_module(module), owner) if owner else importlib.import_module(module)

    def plant(self, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]) -> None:
        """Puts `make(what stands there)` in its place."""
        monkeypatch.setattr(self._owner, self.name, make(self.now))


TARGET_LAW = Seam("target_worker.intake", "Law")
ACCEPT_INVARIANT = Seam("target_worker.decide", "accept_invariant")
ACCEPT_REJECTION = Seam("specdec.ratio", "accept_rejection")
ACCEPT_BLOCK = Seam("specdec.ratio", "accept_block")
TARGET_UNIFORMS = Seam("specdec.ratio", "uniforms")
DENSE_LAWS = Seam("specdec.ratio", "dense_laws")
RESIDUAL = Seam("specdec.accept", "residual")
EXCESS = Seam("specdec.accept", "excess")
RANDOM_WORDS = Seam("specdec.support", "random_words")
EXPONENTIAL = Seam("specdec.support", "exponential_of")
ROW_LAW = Seam("specdec.law:Law", "_row")
RANDOM_SEED = Seam("services.validation", "secrets")
"""Where the gateway gets the seed of a request without one."""

DRAFT_LAW = Seam("specdec.drafters.growth", "Law")
QUANTISED = Seam("specdec.drafters.growth", "quantised")
DRAW_CANDIDATE = Seam("specdec.drafters.growth", "draw_candidate")
DRAFT_UNIFORMS = Seam("specdec.drafters.growth", "uniforms")
