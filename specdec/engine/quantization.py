"""Which weights of a model are rounded when it is loaded, and the test that rounding did not spoil it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from specdec.engine.errors import ModelRefused
from specdec.engine.exact_packing import exact_packing
from specdec.engine.fused_linear import fuse_linears
from specdec.engine.int4_linear import can_round
from specdec.engine.int8_linear import can_round_to_int8, round_linears_to_int8
from specdec.engine.model import Segment
from specdec.engine.numeric_noise import numeric_noise
from specdec.engine.runner import ModelRunner
from specdec.log import Log

PROBE_LENGTH = 40
_CHUNK = 16
LARGEST_MEAN_ERROR = 0.5
"""By how much rounding to 8 bits may move the logits on average, in standard deviations of a row; measured: 0.12 for
Qwen2.5-Coder 1.5B. What moves them by one knows nothing of the model any more."""


class Rounding(Enum):
    """To what the weights of linear layers are rounded."""

    NONE = "none"
    INT4 = "int4"
    """For drafting only: a row may depend on its number of neighbours."""
    INT8 = "int8"
    """For targets: exact, but another model."""


def choose_rounding(quantization: str, model: Any, *, drafts: bool, ranks: int) -> Rounding:
    """quantization: none, int4 (for drafters), int8 (for targets) or auto: int4 for drafters where it is possible.
    ranks: that hold the model. Raises ValueError for what cannot be."""
    if quantization == "int8":
        if drafts or ranks > 1 or not can_round_to_int8(model):
            raise ValueError(
                "quantization is int8, which needs a target alone in bf16 on a CPU that multiplies 8-bit integers "
                f"exactly, not {_described(model, drafts, ranks)}"
            )
        return Rounding.INT8
    if drafts and quantization != "none" and can_round(model):
        return Rounding.INT4
    if quantization == "int4":
        raise ValueError(
            f"quantization is int4, which needs a drafter in bf16 on a CPU, not {_described(model, drafts, ranks)}"
        )
    return Rounding.NONE


def _described(model: Any, drafts: bool, ranks: int) -> str:
    dtype = str(model.dtype).removeprefix("torch.")
    shared = f" shared by {ranks} processes" if ranks > 1 else ""
    return f"a {'drafter' if drafts else 'target'} in {dtype} on {model.device.type}{shared}"


def round_runner(runner: ModelRunner, rounding: Rounding, self_test: bool = True) -> None:
    """Rounds the model of `runner`, whose sequences must all be closed. Raises `ModelRefused` if that spoils it."""
    if rounding is Rounding.INT4 and runner.round_linears_to_int4():
        runner.dtype = rounding.value
    elif rounding is Rounding.INT8:
        before = _probe_logits(runner) if self_test else None
        fuse_linears(runner.model)  # layers that read the same rows scale and round them once
        round_linears_to_int8(runner.model)
        runner.dtype = rounding.value
        runner.linears_changed()
        if before is not None:
            check_rounded(runner, before)
    runner.pack_linears()


def check_rounded(runner: ModelRunner, before: torch.Tensor) -> None:
    """before: what `_probe_logits` were. Also measures the numeric noise anew."""
    after = _probe_logits(runner)
    error = ((after - before).abs().mean(dim=-1) / before.std(dim=-1)).mean().item()
    if not error <= LARGEST_MEAN_ERROR:
        raise ModelRefused(
            f"{runner.name} does not bear weights of 8 bits: its logits move by {error:.2g} standard deviations, "
            f"at most {LARGEST_MEAN_ERROR} are allowed; set quantization to none"
        )
    runner.packing = exact_packing(runner, _probe_tokens(runner))
    runner.numeric_noise = numeric_noise(runner, _probe_tokens(runner))
    if runner.numeric_noise > 0:
        raise ModelRefused(
            f"{runner.name}: with weights of 8 bits its logits depend on what is computed beside them (by "
            f"{runner.numeric_noise:.2g}); set quantization to none"
        )


def _probe_tokens(runner: ModelRunner) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(0, runner.vocabulary_size, (PROBE_LENGTH,), generator=generator).tolist()
    return tokens


def _probe_logits(runner: ModelRunner) -> torch.Tensor:
    """Logits over the probe, [PROBE_LENGTH, vocab]."""
    tokens = _probe_tokens(runner)
    logits: list[torch.Tensor] = []
    runner.open("rounding", Log(b"self-test"))
    try:
        for start in range(0, PROBE_LENGTH, _CHUNK):
            rows = tuple(tokens[start : start + _CHUNK])
            if not runner.reserve("rounding", len(rows)):
                raise ModelRefused(f"{runner.name}: its KV memory does not hold the self-test: raise kv_memory")
            logits += runner.forward([Segment("rounding", rows, None, len(rows))])
            runner.keep("rounding", range(len(rows)))
    finally:
        runner.release("rounding")
    return torch.cat(logits)
