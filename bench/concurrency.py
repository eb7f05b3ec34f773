"""Tokens per second of 16 concurrent plain requests on SmolLM2 against one, interleaved."""

from __future__ import annotations

import asyncio
import time

from bench import report
from bench.deployment import Up

SEQUENCES = 16
TOKENS = 64
REPEATS = 5
PROMPTS = [f"Write down {i + 3} facts about the number {i + 3} and explain each of them." for i in range(SEQUENCES)]


async def tokens_per_second(up: Up, prompts: list[str]) -> float:
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            up.client.complete(prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, speculation="off")
            for prompt in prompts
        )
    )
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started)


async def measure() -> list[tuple[float, float]]:
    async with Up("--model", "smollm2-135m", "--drafter", "ngram") as up:
        await tokens_per_second(up, PROMPTS)
        return [
            (await tokens_per_second(up, PROMPTS[i : i + 1]), await tokens_per_second(up, PROMPTS))
            for i in range(REPEATS)
        ]


def main(command: str) -> None:
    pairs = asyncio.run(measure())
    ratios = {"concurrency.16_vs_1": report.ratio([many / one for one, many in pairs], "at least 7")}
    raw = [{"one": one, "sixteen": many} for one, many in pairs]
    report.write("concurrency", "16 concurrent requests", command, raw, ratios, "Tokens per second, SmolLM2, plain.")
