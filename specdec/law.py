"""The law of one sequence's next token, as a function of its log: logits in, probabilities or tokens out.

Target and drafter make the same law of the same parameters; only then do they agree as often as their models do. What
depends on the tokens before (penalties, bad words, the grammar) is computed for every row from that row's own path, so
it follows the position inside a block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec import sampling
from specdec.grammar import TokenMask
from specdec.params import SamplingParams, StopConditions
from specdec.sampling import DegenerateLogits
from specdec.support import highest_of

Path = Sequence[int]
"""Tokens behind the log, down to and including the candidate that a row stands at."""


class Law:
    """log: the sequence's token ids, which the caller goes on appending to. mask: of its grammar, if it has one."""

    def __init__(
        self, params: SamplingParams, stop: StopConditions, log: Sequence[int], mask: TokenMask | None = None
    ) -> None:
        self.params = params
        self.stop = stop
        self._log = log
        self._mask = mask

    def probs(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Probabilities, float32 [rows, vocab]. logits: [rows, vocab]; row r stands behind log + paths[r].

        Raises DegenerateLogits if a row leaves nothing to draw.
        """
        with self.edited(logits, paths) as edited:
            return sampling.process_logits(edited, self.params)

    def draw(self, logits: Tensor, paths: Sequence[Path]) -> list[int]:
        """The token of each row under the shared noise. Raises DegenerateLogits."""
        if self.params.temperature == 0.0:
            with self.edited(logits, paths) as edited:
                return sampling.greedy(edited)
        return [best[0][0] for best in self.likeliest(logits, paths, 1)]

    def likeliest(self, logits: Tensor, paths: Sequence[Path], count: int) -> list[list[tuple[int, float]]]:
        """Of each row the `count` tokens that come first under the shared noise, the lowest id of equals, each with its
        score: edited logits when greedy, `log p + g` else. Fewer where fewer may be drawn. Raises DegenerateLogits."""
        if logits.is_cuda:
            scores = self.scores(logits, paths)
            if self.params.temperature > 0.0:
                scores = torch.log(scores)
            return [_first(row, count) for row in scores.numpy(force=True)]
        with self.edited(logits, paths) as edited:
            if self.params.temperature == 0.0:
                return [_first(row, count) for row in edited.numpy()]
            supports = sampling.supports(edited, self.params)
        return [
            support.likeliest(self.params.seed, self.position(path), count)
            for support, path in zip(supports, paths, strict=True)
        ]

    def scores(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """What `draw` takes the argmax of: edited logits when greedy, `probs / e` else; [rows, vocab]."""
        if self.params.temperature == 0.0:
            with self.edited(logits, paths) as edited:
                return edited.to(torch.float32, copy=True)
        probs = self.probs(logits, paths)
        rows = [
            sampling.perturbed(row, self.params.seed, self.position(path))
            for row, path in zip(probs, paths, strict=True)
        ]
        return torch.stack(rows)

    def places(self, paths: Sequence[Path]) -> list[tuple[int, int]]:
        """(seed, position) of the noise of each row."""
        return [(self.params.seed, self.position(path)) for path in paths]

    def position(self, path: Path) -> int:
        """Where the token behind `path` would stand in the log."""
        return len(self._log) + len(path)

    @contextmanager
    def edited(self, logits: Tensor, paths: Sequence[Path]) -> Iterator[Tensor]:
        """Bias before penalties, as in transformers: a repetition penalty scales what the bias left. What is forbidden
        stays so. The model's own rows where no more is asked than a least length: to be read while this lasts."""
        params = self.params
        logits = logits if logits.is_cuda else logits.float()
        with sampling.early_stops_masked(logits, [self.position(path) for path in paths], self.stop) as edited:
            edited = sampling.apply_fixed_edits(edited, params)
            if params.depends_on_history:
                edited = torch.stack([self._row(row, path) for row, path in zip(edited, paths, strict=True)])
            yield edited

    def _row(self, row: Tensor, path: Path) -> Tensor:
        """One row [vocab] after the edits that depend on log + path."""
        history = [*self._log, *path]
        row = sampling.penalise(row.float(), history, self.stop.prompt_length, self.params)
        banned = sampling.completed_bad_words(history, self.params.bad_words)
        if banned:
            row[banned] = -torch.inf
        if self._mask is not None:
            allowed = unpacked(self._mask.allowed(history[self.stop.prompt_length :]), len(row))
            row = row.masked_fill(~allowed.to(row.device), -torch.inf)
        return row


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's rows of a step: logits [rows, vocab], and the path at which each stands."""

    law: Law
    logits: Tensor
    paths: Sequence[Path]


def draw_together(batch: Sequence[Rows]) -> list[list[int]]:
    """What `Law.draw` returns for each, with `sampling.NOTHING` in place of an error, for logits on a device that is
    waited for once: sequences with equal parameters are drawn in one go, and only token ids are copied back."""
    groups: dict[SamplingParams, list[int]] = defaultdict(list)
    for i, rows in enumerate(batch):
        groups[replace(rows.law.params, seed=0)].append(i)
    order = [i for members in groups.values() for i in members]
    drawn = [_draw_group(params, [batch[i] for i in members]) for params, members in groups.items()]
    left = torch.cat(drawn).tolist() if drawn else []
    token_ids: list[list[int]] = [[] for _ in batch]
    for i in order:
        token_ids[i], left = left[: len(batch[i].paths)], left[len(batch[i].paths) :]
    return token_ids


def _draw_group(params: SamplingParams, members: Sequence[Rows]) -> Tensor:
    """int64 [rows of all members]; their parameters differ in the seed at most."""
    places = [place for rows in members for place in rows.law.places(rows.paths)]
    with ExitStack() as stack:
        edited = [stack.enter_context(rows.law.edited(rows.logits, rows.paths)) for rows in members]
        logits = torch.cat([rows.float() for rows in edited])
    return sampling.draw_rows(logits, params, places)


def _first(scores: NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """Of one row [vocab]. Raises DegenerateLogits."""
    best = highest_of(scores, min(count, len(scores)))
    if not math.isfinite(best[0][1]):
        raise DegenerateLogits("logits hold NaN or no finite value")
    return [(token_id, score) for token_id, score in best if score > -math.inf]


def unpacked(mask: bytes, vocabulary_size: int) -> Tensor:
    """A `TokenMask`'s bits as bool [vocabulary_size]."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.view(-1)[:vocabulary_size].bool()
