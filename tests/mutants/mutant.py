"""A fault, the test that must fail while it is planted, and the verdict."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest


@dataclass(frozen=True)
class NamedTest:
    """A test function of `module`, called as pytest would."""

    module: str
    function: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        values = f"[{'-'.join(self.arguments)}]" if self.arguments else ""
        return f"{self.module}::{self.function}{values}"

    def failure(self) -> str | None:
        """What the failing assertion says; None if the test passes. Other exceptions are no verdict and are raised."""
        function = getattr(importlib.import_module(self.module), self.function)
        try:
            outcome = function(*self.arguments)
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
        except AssertionError as error:
            return (str(error).splitlines() or [""])[0] or "an assertion failed"
        return None


@dataclass(frozen=True)
class Mutant:
    """plant: puts the fault in place. quick: tried by every run of the tests, not only by `make test-mutants`."""

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    test: NamedTest
    quick: bool = False


@dataclass(frozen=True)
class Verdict:
    """planted, unplanted: why the named test failed, None if it passed."""

    mutant: Mutant
    planted: str | None
    unplanted: str | None
    seconds: float

    @property
    def killed(self) -> bool:
        return self.planted is not None and self.unplanted is None

    @property
    def finding(self) -> str:
        if self.unplanted is not None:
            return f"fails without the fault: {self.unplanted}"
        return self.planted or "the test passes"


@cache
def _unplanted(test: NamedTest) -> str | None:
    return test.failure()


def judge(mutant: Mutant) -> Verdict:
    """Runs the named test without the fault (once per process), then with it."""
    started = time.monotonic()
    unplanted = _unplanted(mutant.test)
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.plant(monkeypatch)
        planted = mutant.test.failure()
    return Verdict(mutant, planted, unplanted, time.monotonic() - started)
