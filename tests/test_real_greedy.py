"""SmolLM2 at temperature 0: whatever was drafted, the ids are those of plain decoding, and those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tools.real_grid import CELLS, DRAFTERS, Cell, Grid, cell_problems, run_grid
from tools.real_prompts import SPEC_BENCH_FILE, own_prompts, spec_bench_prompts
from tools.real_system import DTYPES, real_runner
from tools.stock_model import NEAR_TIE, Difference, StockModel

pytestmark = pytest.mark.timeout(300)

ONE_DIFFERENCE_PER_TOKENS = 3000
ALLOWED_DIFFERENCES_OF_FEW = 1
"""A text shorter than 3,000 tokens may hold one near tie."""


SHARE = 4
"""Every how many-th cell a prompt runs in: all of them take turns, and the tests end in their time."""


@pytest.fixture(scope="module", params=DTYPES)
def grid(request: pytest.FixtureRequest, smollm2: Path) -> Grid:
    """All cells over our own prompts, 24 tokens each."""
    runner = real_runner(smollm2, request.param)
    return asyncio.run(run_grid(runner, own_prompts(smollm2), tokens=24, share=SHARE))


@pytest.fixture(scope="module")
def stock(smollm2: Path) -> StockModel:
    return StockModel(smollm2)


def _check(grid: Grid) -> None:
    assert grid.violations == []
    assert {cell: problems for cell in CELLS if (problems := cell_problems(grid, cell))} == {}
    assert all(len(run.answer.token_ids) == grid.tokens for runs in grid.runs.values() for run in runs)
    assert grid.largest_batch >= 8


def _other_branches(grid: Grid, drafter: str) -> int:
    return sum(run.other_branches for cell, runs in grid.runs.items() if cell.drafter == drafter for run in runs)


def _check_stock(grid: Grid, stock: StockModel) -> None:
    texts = [(prompt.name, prompt.token_ids, grid.plain[prompt.name]) for prompt in grid.prompts]
    differences = stock.differences(texts)
    tokens = sum(len(ours) for _, _, ours in texts)
    print(f"{len(differences)} of {tokens} tokens differ from transformers", *differences, sep="\n")
    assert _wrong(differences) == [], f"differences at a top-2 gap of {NEAR_TIE:g} or more"
    assert len(differences) <= max(ALLOWED_DIFFERENCES_OF_FEW, tokens // ONE_DIFFERENCE_PER_TOKENS)


def _wrong(differences: list[Difference]) -> list[Difference]:
    return [difference for difference in differences if not difference.allowed]


def test_no_drafter_and_no_draft_length_changes_a_token(grid: Grid) -> None:
    assert grid.violations == []
    assert set(grid.runs) == set(CELLS)
    assert grid.largest_batch >= 8


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_speculation_happened_as_the_arithmetic_says(grid: Grid, cell: Cell) -> None:
    """An oracle is accepted whole, an anti draft never, half a draft up to its middle, a tree down its right path."""
    assert len(grid.runs[cell]) >= 2
    assert cell_problems(grid, cell) == []


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name.startswith("tree-")])
def test_trees_took_branches_other_than_the_first(grid: Grid, drafter: str) -> None:
    assert (_other_branches(grid, drafter) >= 20) == (drafter != "tree-1")


@pytest.mark.parametrize("grid", ["fp32"], indirect=True)
def test_plain_decoding_is_what_transformers_generates(grid: Grid, stock: StockModel) -> None:
    _check_stock(grid, stock)


@pytest.fixture(scope="module")
def spec_bench(data: Path) -> Path:
    """Looked for first: nothing is loaded where it is missing."""
    if not (data / SPEC_BENCH_FILE).is_file():
        pytest.skip(
            f"no {data / SPEC_BENCH_FILE}: put the questions of Spec-Bench there, or name their folder, --data DIR"
        )
    return data


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
def test_spec_bench_prompts(spec_bench: Path, dtype: str, smollm2: Path, stock: StockModel) -> None:
    """50 prompts cut to 256 tokens, 64 tokens each."""
    prompts = spec_bench_prompts(smollm2, spec_bench, count=50, max_tokens=256)
    grid = asyncio.run(run_grid(real_runner(smollm2, dtype), prompts, tokens=64, share=2 * SHARE))
    print(f"{grid.num_tokens} tokens in {len(grid.runs)} cells, largest batch {grid.largest_batch}")
    _check(grid)
    assert all(_other_branches(grid, f"tree-{width}") >= 20 for width in (2, 3, 4))
    if dtype == "fp32":
        _check_stock(grid, stock)
