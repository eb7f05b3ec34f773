"""Every faulty sampler is noticed by the test that names its fault. `make test-mutants` tries them all."""

from __future__ import annotations

import pytest

from mutants.catalogue import FAULTY_SAMPLERS, INVARIANT_FAULTS, MUTANTS
from mutants.mutant import Mutant, judge


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, marks=() if mutant.quick else pytest.mark.slow, id=mutant.name) for mutant in MUTANTS],
)
def test_the_named_test_notices(mutant: Mutant) -> None:
    verdict = judge(mutant)
    assert verdict.killed, f"{mutant.test}: {verdict.finding}"


def test_the_catalogue_is_whole() -> None:
    assert len(FAULTY_SAMPLERS) == 14
    assert len(INVARIANT_FAULTS) == 3
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
