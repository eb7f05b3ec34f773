"""transformers' own `generate` as contestants: plain, with a draft model (constant number of candidates), and prompt
lookup. In this process, with the threads that our workers have; our workers wait passively meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.contestants import Answer, Question

KINDS = ("plain", "assisted", "lookup")
CANDIDATES = 5


class Models:
    """Loaded once for all kinds; dtype: bf16 or fp32. draft: "" for none."""

    def __init__(self, target: str, draft: str, threads: int, dtype: str = "bf16") -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        from services.models import resolve

        quiet: Any = logging  # it has no types
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
        torch.set_num_threads(threads)
        kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(resolve(target))
        self.target: Any = AutoModelForCausalLM.from_pretrained(resolve(target), dtype=kind)
        self.draft: Any = None
        if draft:
            self.draft = AutoModelForCausalLM.from_pretrained(resolve(draft), dtype=kind)
            self.draft.generation_config.num_assistant_tokens = CANDIDATES
            self.draft.generation_config.num_assistant_tokens_schedule = "constant"
            self.draft.generation_config.assistant_confidence_threshold = 0.0

    def generate(self, prompts: Sequence[str], tokens: int, **options: Any) -> tuple[list[list[int]], float]:
        """Token ids behind each prompt, all in one padded batch, and seconds."""
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        self.tokenizer.padding_side = "left"
        ids: Any = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=len(prompts) > 1
        )
        started = time.perf_counter()
        output = self.target.generate(**ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        seconds = time.perf_counter() - started
        return output[:, ids["input_ids"].shape[1] :].tolist(), seconds


class Stock:
    """One kind of `generate`. It blocks the event loop while it computes, so that nothing of ours runs meanwhile."""

    def __init__(self, name: str, kind: str, models: Models) -> None:
        self.name = name
        self._kind = kind
        self._models = models

    async def answer(self, question: Question) -> Answer:
        token_ids, seconds = await self.batch([question])
        return Answer(token_ids[0], seconds)

    async def batch(self, questions: Sequence[Question]) -> tuple[list[list[int]], float]:
        """In one padded batch."""
        first = questions[0]
        options: dict[str, Any] = {"do_sample": first.temperature > 0}
        if first.temperature > 0:
            options |= {"temperature": first.temperature, "top_p": first.top_p, "top_k": 0}
        if self._kind == "assisted":
            options["assistant_model"] = self._models.draft
        elif self._kind == "lookup":
            options |= {"prompt_lookup_num_tokens": CANDIDATES, "max_matching_ngram_size": 3}
        return self._models.generate([question.prompt for question in questions], first.tokens, **options)


def contestants(kinds: Sequence[str], target: str, draft: str, threads: int, dtype: str = "bf16") -> Iterator[Stock]:
    """Loads nothing if `kinds` is empty."""
    if kinds:
        models = Models(target, draft if "assisted" in kinds else "", threads, dtype)
        for kind in kinds:
            yield Stock(f"transformers_{kind}", kind, models)
