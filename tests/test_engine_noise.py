"""How far logits depend on what is computed beside them is measured at load, and told with the model's identity."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from services.worker_start import model_identity
from specdec.engine.exact_packing import exact_packing, smallest_tile
from specdec.engine.model import Segment
from specdec.engine.numeric_noise import numeric_noise
from specdec.engine.packing import LOOSE, PADDED, SINGLE, TILE
from specdec.engine.self_test import self_test
from specdec.log import Log
from specdec.messages import Role
from specdec.vocabulary import VocabularyDigest
from tools.engine import draw_tokens, feed, tiny_model, tiny_runner
from tools.identities import tokenizer_json, words


class BatchScale(torch.nn.Module):
    """The rows of a forward weigh a little on each other, less than what a model is refused for."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(rows) * (1.0 + self.amount * rows.abs().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_a_cpu_no_bit_depends_on_neighbours(dtype: torch.dtype) -> None:
    assert self_test(tiny_runner(tiny_model("Llama", dtype))) == 0.0


def test_two_ways_to_attend_are_seen() -> None:
    """Over block tables a tree takes its whole forward to the other one, so a row's bits depend on that."""
    assert self_test(tiny_runner(tiny_model("Llama"), attention="varlen_reference")) > 0.0


@pytest.mark.parametrize("amount", [1e-5, 1e-6])
def test_it_is_at_least_what_other_neighbours_do_to_a_gap(amount: float) -> None:
    model = tiny_model("Llama")
    runner = tiny_runner(model, attention="sdpa")
    model.model.layers[1].mlp.act_fn = BatchScale(amount)
    noise = self_test(runner)

    runner.open("alone", Log(b""))
    runner.open("beside", Log(b""))
    runner.open("neighbour", Log(b""))
    rows = tuple(draw_tokens(6, seed=3))
    alone = feed(runner, "alone", rows)
    assert runner.reserve("beside", 6)
    assert runner.reserve("neighbour", 40)
    beside, _ = runner.forward([Segment("beside", rows, None, 6), Segment("neighbour", (7,) * 40)])
    moved = alone - beside
    spread = (moved.max(dim=-1).values - moved.min(dim=-1).values).max().item()
    assert spread <= noise
    assert spread > 0 or amount < 1e-5


def test_where_anything_moves_it_is_not_below_what_the_dtype_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few rows none but a small logit may have moved, and by little."""
    runner = tiny_runner(tiny_model("Llama", torch.bfloat16))
    forward, largest = runner.forward, 0.0

    def nudged(segments: Sequence[Segment]) -> list[torch.Tensor]:
        nonlocal largest
        logits = [rows.index_fill(1, torch.tensor([0]), 1e-4 * len(segments)) for rows in forward(segments)]
        largest = max(largest, *(rows.abs().max().item() for rows in logits if len(rows)))
        return logits

    monkeypatch.setattr(runner, "forward", nudged)
    noise = numeric_noise(runner, draw_tokens(40))
    assert 0.5 * largest < noise / (2 * torch.finfo(torch.bfloat16).eps) <= largest


class OddRows(torch.nn.Module):
    """Rows come out otherwise where their number is no multiple of 4, as with some kernels."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(rows) * (1.0 if rows.shape[-2] % 4 == 0 else 1.0 + 2**-6)


def _row_by_row(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """On some CPUs the bits of torch's products depend on the number of rows, on others not."""
    outputs = torch.stack([torch.mv(weight, row) for row in rows.reshape(-1, rows.shape[-1])])
    return (outputs if bias is None else outputs + bias).view(*rows.shape[:-1], -1)


def test_rows_are_padded_only_where_bits_depend_on_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", _row_by_row)
    model = tiny_model("Llama", torch.bfloat16)
    runner = tiny_runner(model, attention="sdpa")
    self_test(runner)
    assert runner.packing.row_multiple == SINGLE.row_multiple
    model.model.layers[1].mlp.act_fn = OddRows()
    assert exact_packing(runner, draw_tokens(40)).row_multiple == PADDED.row_multiple
    assert self_test(runner) == 0.0
    assert runner.packing.row_multiple == PADDED.row_multiple


def test_tiles_are_small_only_where_bits_do_not_depend_on_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of keys."""
    runner = tiny_runner(tiny_model("Llama"))
    sizes = {}
    for rows_needed in (0, 5, 10, 20):  # of the folded query, three for each position

        def attend(query: torch.Tensor, key: torch.Tensor, *rest: object, needed: int = rows_needed) -> torch.Tensor:
            return query if query.shape[2] >= needed or key.shape[2] < 2000 else query + 1

        monkeypatch.setattr(runner, "attend", attend)
        sizes[rows_needed] = smallest_tile(runner)
    assert sizes == {0: 1, 5: 2, 10: 4, 20: TILE}


def test_a_drafter_is_not_measured() -> None:
    model = tiny_model("Llama")
    runner = tiny_runner(model)
    runner.packing = LOOSE
    model.model.layers[1].mlp.act_fn = BatchScale(1e-5)
    assert self_test(runner) == 0.0


def test_schedulers_are_told() -> None:
    runner = tiny_runner(tiny_model("Llama"))
    runner.numeric_noise = 0.125
    digest = VocabularyDigest.of(tokenizer_json(words(64)))
    assert model_identity("t", Role.TARGET, "tiny", runner, digest).numeric_noise == 0.125
