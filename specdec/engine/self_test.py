"""The self-test at load: a model whose paged forward is not its stock forward is refused, never served wrong.

Two parts. *Structure*: the model's class with few small random layers must agree with its stock forward in fp32, and
every attention layer must call us exactly once. *Weights*: the real model must agree with its stock forward wherever
that is sure, and a row's logits must not depend on the rows beside it. How far they do is measured and told.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine import attention
from specdec.engine.errors import ModelRefused
from specdec.engine.exact_packing import exact_packing
from specdec.engine.model import Segment
from specdec.engine.numeric_noise import numeric_noise
from specdec.engine.parallel import whole
from specdec.engine.runner import ModelRunner
from specdec.engine.tiny_config import TINY_VOCABULARY, tiny_config
from specdec.log import Log

log = logging.getLogger(__name__)

PROBE_LENGTH = 40
STRUCTURE_TOLERANCE = 1e-4
SURE_GAP = 8.0
"""A stock top-1 is sure when it leads by so many rounding steps of the largest logit."""
LARGEST_MEAN_ERROR = 0.2
"""Mean difference of logits at most, in standard deviations of the stock logits."""
NEIGHBOUR_TOLERANCE = 1e-3
"""Difference in logits, beside other neighbours, above which a model is refused; any is logged."""
NEIGHBOUR_ROUNDINGS = 2.0
"""The same on CUDA, in rounding steps of the largest logit: libraries choose kernels by the number of rows there. Not
measured on a GPU yet."""

TREE_PARENTS = (-1, -1, 0, 1, 1, 4, 0)
TREE_PATH = (1, 4, 5)
"""The kept rows: not the first branch, so that slots must be moved."""


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One row's logits [vocab], and the tokens up to and including the row."""

    logits: torch.Tensor
    token_ids: tuple[int, ...]


class _Refusal(Exception):
    """Why, in words that follow the model's name."""


def self_test(runner: ModelRunner) -> float:
    """The numeric noise of a target's logits (see `numeric_noise`); 0 for a drafter, of whom nobody asks. Raises
    `ModelRefused`, naming the model and the reason. The runner's sequences must all be closed."""
    try:
        check_structure(runner.model, runner.is_compiled)
        return check_weights(runner)
    except _Refusal as refusal:
        raise ModelRefused(
            f"{runner.name} ({type(runner.model).__name__}) cannot be served right: {refusal}; use another model"
        ) from refusal


def check_structure(model: Any, compiled: bool = False) -> None:
    """compiled: with decoder layers of our own. Raises `_Refusal` unless the class, built small with random weights,
    agrees with its stock forward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny = _build_tiny(model)
        probe = torch.randint(0, TINY_VOCABULARY, (PROBE_LENGTH,)).tolist()
    config = tiny.config.get_text_config()
    runner = _guarded(
        lambda: ModelRunner(
            tiny, name="tiny", vocabulary_size=config.vocab_size, context_length=64, kv_blocks=16, compiled=compiled
        )
    )
    rows = _guarded(lambda: list(_probe(runner, [token % config.vocab_size for token in probe])))
    expected_layers = list(range(config.num_hidden_layers))
    if not compiled and sorted(runner.layers_called) != expected_layers:
        raise _Refusal(f"its attention layers {expected_layers} called paged attention as {runner.layers_called}")
    error = max((row.logits - stock).abs().max().item() for row, stock in _with_stock(runner, rows))
    if not error <= STRUCTURE_TOLERANCE:
        raise _Refusal(f"its structure needs more than paged causal attention (logits off by {error:.2g})")


def _build_tiny(model: Any) -> Any:
    try:
        tiny = type(model)(tiny_config(model.config)).float().eval()
    except Exception:  # a configuration whose widths hang together in a way of its own
        tiny = _guarded(lambda: type(model)(tiny_config(model.config, narrow=False)).float().eval())
    for parameter in tiny.parameters():
        if parameter.ndim >= 2:  # the stock initialisation is so small that a wrong attention hardly shows
            torch.nn.init.normal_(parameter, std=1.5 / math.sqrt(parameter.shape[-1]))
    return tiny


def _guarded(run: Callable[[], Any]) -> Any:
    """Whatever a strange model raises inside our forward is a reason to refuse it."""
    try:
        return run()
    except Exception as error:
        raise _Refusal(f"its small copy or its forward over paged KV fails ({_short(error)})") from error


def _short(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:120] or type(error).__name__


def _probe(runner: ModelRunner, token_ids: Sequence[int]) -> Iterator[ProbeRow]:
    """Chunk, chunk, verify with a rejection, tree with a kept side branch, plain step, over `PROBE_LENGTH` tokens."""
    kept: list[int] = []

    def step(rows: Sequence[int], parents: tuple[int, ...] | None, keep: Sequence[int]) -> Iterator[ProbeRow]:
        if not runner.reserve("probe", len(rows)):
            raise _Refusal("its KV memory does not hold the self-test: raise kv_memory")
        [logits] = runner.forward([Segment("probe", tuple(rows), parents, len(rows))])
        chain = parents if parents is not None else range(-1, len(rows) - 1)
        paths: list[tuple[int, ...]] = []
        for i, parent in enumerate(chain):
            paths.append((*(paths[parent] if parent >= 0 else kept), rows[i]))
            yield ProbeRow(logits[i], paths[i])
        runner.keep("probe", keep)
        kept.extend(rows[i] for i in keep)

    runner.open("probe", Log(b"self-test"))
    try:
        yield from step(token_ids[:17], None, range(17))
        yield from step(token_ids[17:23], None, range(6))
        yield from step(token_ids[23:29], None, range(2))
        yield from step(token_ids[29:36], TREE_PARENTS, TREE_PATH)
        yield from step(token_ids[36:40], None, range(4))
    finally:
        runner.release("probe")


def _stock_implementation(model: Any) -> str:
    """torch's fused attention where the class has it: in bf16 the eager one rounds scores, which Qwen's large key
    biases turn into other tokens. It knows no soft cap."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if getattr(model, "_supports_sdpa", False) and softcap is None else "eager"


@contextmanager
def _stock_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation(_stock_implementation(model))
    try:
        yield
    finally:
        model.set_attn_implementation(attention.ATTENTION_NAME)


@torch.inference_mode()
def _with_stock(runner: ModelRunner, rows: Sequence[ProbeRow]) -> list[tuple[ProbeRow, torch.Tensor]]:
    """Each row with the logits of the model's own uncached forward, [vocab]; rows on one path share a forward."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    with _stock_attention(runner.model):
        for row in sorted(rows, key=lambda row: -len(row.token_ids)):
            if row.token_ids in found:
                continue
            ids = torch.tensor([row.token_ids], device=runner.model.device)
            logits = runner.model(input_ids=ids, use_cache=False).logits[0, :, : runner.vocabulary_size].float()
            found.update({row.token_ids[: i + 1]: logits[i] for i in range(len(row.token_ids))})
    return [(row, found[row.token_ids]) for row in rows]


def check_weights(runner: ModelRunner) -> float:
    """Raises `_Refusal` unless the real model agrees with its stock forward and its rows mind no neighbours. Returns
    the numeric noise."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(0, runner.vocabulary_size, (PROBE_LENGTH // 3 + 1,), generator=generator).tolist()
    probe = (pattern * 3)[:PROBE_LENGTH]  # repeated, so that the model is sure of something
    rows = _guarded(lambda: list(_probe(runner, probe)))
    for row, stock in _with_stock(runner, rows):
        _compare(row.logits, stock, torch.finfo(runner.model.dtype).eps)
    if not runner.packing.exact:
        return 0.0
    runner.packing = _guarded(lambda: exact_packing(runner, probe))
    _check_neighbours(runner, probe)
    noise: float = _guarded(lambda: numeric_noise(runner, probe))
    if not math.isfinite(noise):
        raise _Refusal("its logits are not finite")
    if noise > 0:
        log.warning(
            "%s: the gap of two logits moves by up to %.2g with what is computed beside them: the audit takes what was "
            "won by less for a near-tie", runner.name, noise,
        )  # fmt: skip
    return noise


def _compare(logits: torch.Tensor, stock: torch.Tensor, rounding: float) -> None:
    if not torch.isfinite(logits).all():
        raise _Refusal("its logits are not finite")
    best = stock.topk(2).values
    noise = SURE_GAP * rounding * stock.abs().max().item()
    if (best[0] - best[1]).item() > noise and logits.argmax() != stock.argmax():
        raise _Refusal("its likeliest token over paged KV is not that of its own forward")
    error = ((logits - stock).abs().mean() / stock.std()).item()
    if not error <= LARGEST_MEAN_ERROR:
        raise _Refusal(f"its logits over paged KV are not those of its own forward (off by {error:.2g} deviations)")


def _check_neighbours(runner: ModelRunner, probe: Sequence[int]) -> None:
    """The same rows alone, and beside a stranger and an outlier (the token of the largest embedding, repeated)."""
    norms = whole(runner.model.get_input_embeddings().weight)[: runner.vocabulary_size].float().norm(dim=-1)
    outlier = int(norms.argmax())
    rows = tuple(probe[:6])
    names = ("row", "stranger", "outlier")
    segments = [
        Segment("row", rows, None, 6),
        Segment("stranger", tuple(probe[7:20])),
        Segment("outlier", (outlier,) * 5),
    ]
    for name in names:
        runner.open(name, Log(b"self-test"))
    try:
        for segment in segments:
            if not runner.reserve(segment.sequence_id, len(segment.token_ids)):
                raise _Refusal("its KV memory does not hold the self-test: raise kv_memory")
        alone = _guarded(lambda: runner.forward(segments[:1]))[0]
        beside = _guarded(lambda: runner.forward(segments[::-1]))[-1]
    finally:
        for name in names:
            runner.release(name)
    error = (alone - beside).abs().max().item()
    if not error <= neighbour_tolerance(alone, runner.model.dtype):
        raise _Refusal(f"a row's logits depend on the rows beside it (by {error:.2g})")
    if error > 0:
        log.warning("%s: a row's logits depend on the rows beside it by up to %.2g", runner.name, error)


def neighbour_tolerance(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """By how much logits [rows, vocab] of a model in `dtype` may move beside other neighbours."""
    if not logits.is_cuda:
        return NEIGHBOUR_TOLERANCE
    return max(NEIGHBOUR_TOLERANCE, NEIGHBOUR_ROUNDINGS * torch.finfo(dtype).eps * logits.abs().max().item())
