"""The stock model under transformers' own `generate`, and the comparison of our tokens with its."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from specdec.engine.loading import read_model

NEAR_TIE = 2e-4
"""A difference is allowed where the reference's two highest logits are closer than this: stock cached and uncached
forwards differ by up to 8e-5."""
BATCH = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the reference says another token. gap: between its two highest logits there."""

    prompt: str
    position: int
    ours: int
    reference: int
    gap: float

    @property
    def allowed(self) -> bool:
        return self.gap < NEAR_TIE


@dataclass(frozen=True, slots=True)
class Continuation:
    token_ids: list[int]
    gaps: list[float]


class StockModel:
    """float32, sdpa, greedy, no speculation, and no end before the budget."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = read_model(folder, torch.float32).eval()
        self._model.set_attn_implementation("sdpa")
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Continuation]:
        """The continuations of one batch, shorter prompts padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
        highest = torch.stack(output.logits, dim=1).float().topk(2).values  # [prompts, tokens, 2]
        gaps = (highest[..., 0] - highest[..., 1]).tolist()
        return [Continuation(row, gap) for row, gap in zip(output.sequences[:, longest:].tolist(), gaps, strict=True)]

    @torch.inference_mode()
    def generate_with(self, prompt: Sequence[int], tokens: int, processors: LogitsProcessorList) -> list[int]:
        """The greedy continuation of one prompt under these processors."""
        output = self._model.generate(
            input_ids=torch.tensor([list(prompt)]),
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            logits_processor=processors,
        )
        return [int(token_id) for token_id in output[0, len(prompt) :]]

    def differences(self, texts: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> list[Difference]:
        """texts: (name, prompt, our tokens). After a near tie the reference goes on from our token."""
        found: list[Difference] = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            count = max(len(ours) for _, _, ours in batch)
            said = self.generate([prompt for _, prompt, _ in batch], count)
            for (name, prompt, ours), reference in zip(batch, said, strict=True):
                found += self._compare(name, prompt, ours, reference)
        return found

    def _compare(
        self, name: str, prompt: Sequence[int], ours: Sequence[int], reference: Continuation
    ) -> list[Difference]:
        found: list[Difference] = []
        done = 0
        while True:
            pairs = zip(ours[done:], reference.token_ids, strict=False)
            at = next((i for i, (mine, its) in enumerate(pairs) if mine != its), None)
            if at is None:
                return found
            found.append(Difference(name, done + at, ours[done + at], reference.token_ids[at], reference.gaps[at]))
            done += at + 1
            if not found[-1].allowed or done == len(ours):
                return found
            [reference] = self.generate([[*prompt, *ours[:done]]], len(ours) - done)
