"""The Qwen2.5-Coder pair on HumanEval, greedy, bf16: ours with and without speculation, and transformers' own.

All contestants answer prompt i before any answers prompt i + 1, in turn on the same cores. transformers runs in this
process with the threads that our target has; our workers wait passively meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from bench import report
from bench.deployment import Up

TARGET = "qwen2.5-coder-1.5b"
DRAFT = "qwen2.5-coder-0.5b"
DRAFT_LENGTH = 5
THREADS = 2
INSTRUCTION = "Complete this Python function. Answer with code only.\n\n"

Generate = Callable[[str], tuple[list[int], float]]


def prompts(data: Path, count: int) -> list[str]:
    path = data / "human_eval.jsonl"
    if not path.is_file():
        sys.exit(f"{path} is missing: put HumanEval's problems there (one JSON object with a field `prompt` a line)")
    lines = path.read_text().splitlines()[:count]
    return [INSTRUCTION + json.loads(line)["prompt"] for line in lines]


class Stock:
    """transformers' `generate`, plain and with the draft model as assistant (5 candidates, constant)."""

    def __init__(self, tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from services.models import resolve

        torch.set_num_threads(THREADS)
        self._tokens = tokens
        self._tokenizer = AutoTokenizer.from_pretrained(resolve(TARGET))
        self._model: Any = AutoModelForCausalLM.from_pretrained(resolve(TARGET), dtype=torch.bfloat16)
        self._draft: Any = AutoModelForCausalLM.from_pretrained(resolve(DRAFT), dtype=torch.bfloat16)
        self._draft.generation_config.num_assistant_tokens = DRAFT_LENGTH
        self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        self._draft.generation_config.assistant_confidence_threshold = 0.0

    def plain(self, prompt: str) -> tuple[list[int], float]:
        return self._generate(prompt)

    def assisted(self, prompt: str) -> tuple[list[int], float]:
        return self._generate(prompt, assistant_model=self._draft)

    def _generate(self, prompt: str, **options: Any) -> tuple[list[int], float]:
        """Token ids and seconds."""
        messages = [{"role": "user", "content": prompt}]
        ids: Any = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        started = time.perf_counter()
        output = self._model.generate(
            **ids, do_sample=False, max_new_tokens=self._tokens, min_new_tokens=self._tokens, **options
        )
        return output[0, ids["input_ids"].shape[1] :].tolist(), time.perf_counter() - started


async def ours(up: Up, prompt: str, tokens: int, speculation: Literal["on", "off"]) -> dict[str, Any]:
    started = time.perf_counter()
    answer = await up.client.complete(
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        min_tokens=tokens,
        temperature=0.0,
        speculation=speculation,
        draft_length=DRAFT_LENGTH if speculation == "on" else None,
    )
    seconds = time.perf_counter() - started
    figures = answer.finished.speculation
    return {
        "token_ids": list(answer.token_ids),
        "seconds": seconds,
        "acceptance_rate": figures.acceptance_rate,
        "mean_acceptance_length": figures.mean_acceptance_length,
    }


async def measure(data: Path, count: int, tokens: int, contestants: dict[str, Generate]) -> list[dict[str, Any]]:
    arguments = ("--model", TARGET, "--draft-model", DRAFT, "--threads", str(THREADS))
    rows: list[dict[str, Any]] = []
    async with Up(*arguments) as up:
        await ours(up, "Say hello.", 16, "on")
        for i, prompt in enumerate(prompts(data, count)):
            row: dict[str, Any] = {"prompt": i}
            row["plain"] = await ours(up, prompt, tokens, "off")
            row["speculative"] = await ours(up, prompt, tokens, "on")
            for name, run in contestants.items():
                ids, seconds = run(prompt)
                row[name] = {"token_ids": ids, "seconds": seconds}
            rows.append(row)
            shown = ", ".join(f"{key} {row[key]['seconds']:.1f} s" for key in row if key != "prompt")
            print(f"prompt {i + 1} of {count}: {shown}", file=sys.stderr)
    return rows


def main(
    command: str, data: Path, count: int = 20, tokens: int = 128, stock: tuple[str, ...] = ("plain", "assisted")
) -> None:
    contestants: dict[str, Generate] = {}
    if stock:
        models = Stock(tokens)
        runs = {"plain": models.plain, "assisted": models.assisted}
        contestants = {f"transformers_{name}": runs[name] for name in stock}
    rows = asyncio.run(measure(data, count, tokens, contestants))
    ratios = {"qwen.outrider_vs_own_plain": _speedup(rows, "plain", "at least 1.5")}
    for name in contestants:
        ratios[f"qwen.outrider_vs_{name}"] = _speedup(rows, name)
    same = sum(row["plain"]["token_ids"] == row["speculative"]["token_ids"] for row in rows)
    rates = [row["speculative"]["acceptance_rate"] for row in rows]
    notes = (
        f"{count} HumanEval prompts of {tokens} tokens, greedy, bf16, draft length {DRAFT_LENGTH}, {THREADS} threads. "
        f"{same} of {count} speculative answers have the token ids of plain decoding. "
        f"Mean acceptance rate {sum(rates) / len(rates):.3f}."
    )
    report.write("pair", "Qwen2.5-Coder 1.5B with 0.5B", command, rows, ratios, notes)


def _speedup(rows: list[dict[str, Any]], against: str, goal: str = "") -> report.Ratio:
    """How many times as fast as `against` the speculative answers were, prompt by prompt."""
    return report.ratio([row[against]["seconds"] / row["speculative"]["seconds"] for row in rows], goal)
