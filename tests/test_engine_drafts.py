"""What only a drafter's engine may do: rounded weights and loose packing. Both stay near the plain forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from specdec.digest import root_digest
from specdec.drafter import DraftJob
from specdec.drafters.model import ModelDrafter
from specdec.engine.int4_linear import LEVELS, MOST_ROUNDED_ROWS, Int4Linear, round_linears
from specdec.engine.layout import SequenceRows, pack
from specdec.engine.loading import build_runner, load
from specdec.engine.model import Segment
from specdec.engine.packing import LOOSE
from specdec.log import Log
from specdec.params import SamplingParams, StopConditions
from tools.engine import draw_tokens, feed, feed_in_chunks, tiny_model, tiny_runner
from tools.table_law import TableLaw
from tools.table_model import TableModel


def _linear(width: int, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(width, 64, bias=bias, dtype=torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_rounded_weights_are_within_half_a_level(bias: bool) -> None:
    linear = _linear(128, bias)
    rounded = Int4Linear(linear, 32)
    rows = torch.eye(128, dtype=torch.bfloat16)
    weight = torch.cat(
        [rounded(rows[i : i + MOST_ROUNDED_ROWS]) for i in range(0, 128, MOST_ROUNDED_ROWS)]
    )  # the rounded weight itself, and the bias
    if linear.bias is not None:
        weight = weight - linear.bias
    groups = linear.weight.float().view(64, -1, 32)
    level = (groups.amax(-1) - groups.amin(-1)) / LEVELS
    error = (weight.float().T - linear.weight.float()).abs().view(64, -1, 32).amax(-1)
    assert (error <= 0.55 * level + 0.01 * linear.weight.float().abs().max()).all()
    assert error.max() > 0.3 * level.min()  # it was rounded


@torch.inference_mode()
def test_many_rows_take_the_weights_as_they_are() -> None:
    linear = _linear(128)
    rows = torch.randn(MOST_ROUNDED_ROWS + 1, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rounded = Int4Linear(linear, 32)
    assert torch.equal(rounded(rows), linear(rows))
    assert not torch.equal(rounded(rows[:-1]), linear(rows)[:-1])


def test_only_what_a_group_divides_is_rounded() -> None:
    model = tiny_model("Llama", torch.bfloat16, hidden_size=96, intermediate_size=80)
    count = round_linears(model)
    kinds = {name.rsplit(".", 1)[-1]: type(module) for name, module in model.named_modules()}
    assert kinds["q_proj"] is Int4Linear
    assert kinds["down_proj"] is nn.Linear  # 80 inputs
    assert count == sum(isinstance(module, Int4Linear) for module in model.modules())


def test_a_drafter_on_the_cpu_is_rounded_and_a_target_never(tmp_path: Path) -> None:
    tiny_model("Llama").save_pretrained(tmp_path)
    draft = load(tmp_path, dtype="bf16", kv_memory=2**24, drafts=True, quantization="auto")
    assert (draft.dtype, draft.packing.exact) == ("int4", False)
    assert load(tmp_path, dtype="bf16", kv_memory=2**24, drafts=True).dtype == "bfloat16"
    target = load(tmp_path, dtype="bf16", kv_memory=2**24, quantization="auto")
    assert (target.dtype, target.packing.exact) == ("bfloat16", True)
    with pytest.raises(ValueError, match="quantization is int4, which needs a drafter in bf16 on a CPU"):
        load(tmp_path, dtype="fp32", kv_memory=2**24, drafts=True, quantization="int4")


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_loose_packing_computes_the_same(rows: int) -> None:
    token_ids = draw_tokens(60 + rows)
    loose = build_runner(tiny_model("Mistral"), name="tiny", kv_memory=2**24, max_context=768, exact=False)
    loose.open("s", Log(b"s"))
    feed(loose, "s", token_ids[:60])
    found = feed(loose, "s", token_ids[60:])
    expected = feed_in_chunks(tiny_runner(tiny_model("Mistral")), token_ids, len(token_ids))[60:]
    assert torch.allclose(found, expected, atol=1e-4)
    neighbours = [Segment("s", (5,)), Segment("t", tuple(token_ids[:2]))]
    loose.open("t", Log(b"t"))
    assert all(loose.reserve(segment.sequence_id, 2) for segment in neighbours)
    beside = loose.forward(neighbours)[0]
    assert torch.allclose(beside, loose.forward(neighbours[:1])[0], atol=1e-4)


def test_loose_packing_pads_nothing_for_one_row() -> None:
    sequence = SequenceRows((7,), None, 60, torch.arange(2, 66).numpy())
    layout = pack([sequence], torch.device("cpu"), LOOSE)
    assert layout.token_ids.shape == (1, 1)
    assert [tuple(group.positions.shape) for group in layout.groups] == [(1, 1)]
    assert pack([sequence], torch.device("cpu")).token_ids.shape == (1, 4)


def test_a_round_takes_no_more_forwards_than_candidates() -> None:
    """After a block that was right throughout two tokens have no KV: both go into the forward of the next candidate."""
    model = TableModel(TableLaw())
    drafter = ModelDrafter(model)
    log = Log(root_digest(b"", "test"), [1, 2, 3])
    job = DraftJob("s", log, SamplingParams(temperature=0.0), StopConditions(3, 500), 4, 1)
    for _ in range(3):
        before = model.num_forwards
        [tree] = drafter.draft([job])
        assert model.num_forwards - before == len(tree) == 4
        log.append([*tree.token_ids, 9])
