"""How far a row's logits depend on what is computed beside it, measured on the model itself when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.log import Log

PREFIX_LENGTH = 21
ROWS = 4
"""That are compared, behind the prefix."""
ROUNDINGS = 2.0
"""Rounding steps of the largest logit by which a gap moves at least, where anything moves at all: each of two logits
may be rounded to its neighbour. A few rows that came out equal do not show that all do."""

_STRANGER = "stranger"
_TREE = (-1, -1, 0, 1)


def numeric_noise(runner: ModelRunner, token_ids: Sequence[int]) -> float:
    """By how much the gap between two logits of a row may move with what shares its forwards: 0 if no bit of a row
    depends on that, as on a CPU.

    The same rows are computed in plain steps of one, in one packed verify, and in forwards beside a prefill and a tree,
    each over KV that came about in the same way, as it does where an answer is served and where it is decoded again.
    The largest difference of any logit counts twice, since both of a pair may move. Raises ValueError if the KV
    memory does not hold it. token_ids: at least `PREFIX_LENGTH + ROWS`; the runner's sequences must all be closed.
    """
    prefix, rows = tuple(token_ids[:PREFIX_LENGTH]), tuple(token_ids[PREFIX_LENGTH : PREFIX_LENGTH + ROWS])
    steps = [prefix, *((token_id,) for token_id in rows)]
    plain = fed_logits(runner, steps)
    packed = fed_logits(runner, [prefix, rows])
    mixed = fed_logits(runner, [prefix, rows], beside=True)
    moved = max((plain - other).abs().max().item() for other in (packed, mixed))
    if moved == 0 and not plain.is_cuda:
        return 0.0
    rounding = torch.finfo(runner.model.dtype).eps * plain.abs().max().item()
    return max(2 * moved, ROUNDINGS * rounding)


def fed_logits(runner: ModelRunner, chunks: Sequence[tuple[int, ...]], beside: bool = False) -> torch.Tensor:
    """Logits of the last `ROWS` tokens of a sequence that is fed chunk by chunk, [ROWS, vocab]. beside: in forwards
    with a stranger, who prefills first and then has a tree verified."""
    kept: list[torch.Tensor] = []
    with opened(runner, ("row", _STRANGER)):
        for i, chunk in enumerate(chunks):
            segments = [Segment("row", chunk, None, len(chunk))]
            if beside:
                parents = _TREE if i else None
                segments.insert(0, Segment(_STRANGER, chunk[::-1], parents, len(chunk) if i else 0))
            for segment in segments:
                if not runner.reserve(segment.sequence_id, len(segment.token_ids)):
                    raise ValueError("the KV memory does not hold the self-test: raise kv_memory")
            kept.append(runner.forward(segments)[-1])
            for segment in segments:
                chain = range(len(segment.token_ids)) if segment.parents is None else ()
                runner.keep(segment.sequence_id, chain)
    return torch.cat(kept)[-ROWS:]


@contextmanager
def opened(runner: ModelRunner, names: Sequence[str]) -> Iterator[None]:
    for name in names:
        runner.open(name, Log(b"numeric noise"))
    try:
        yield
    finally:
        for name in names:
            runner.release(name)
