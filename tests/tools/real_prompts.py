"""Prompts for a real model as token ids: the project's own, and Spec-Bench's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from services.chat import ChatTemplate
from services.tokenizer import Tokenizer, load_bundle

OWN_PROMPTS = Path(__file__).resolve().parents[1] / "data" / "prompts.json"
SPEC_BENCH_FILE = "spec_bench.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    token_ids: tuple[int, ...]


def own_prompts(folder: Path) -> list[Prompt]:
    """Code, lists, prose to be copied, chat, other languages: as the tokenizer in `folder` reads them."""
    entries = json.loads(OWN_PROMPTS.read_text(encoding="utf-8"))
    reader = _Reader(folder)
    return [Prompt(entry["name"], reader.read(entry["text"], entry.get("chat", False))) for entry in entries]


def spec_bench_prompts(folder: Path, data: Path, count: int, max_tokens: int) -> list[Prompt]:
    """First turns of `count` questions spread over the file and so over its categories, cut to `max_tokens`."""
    lines = (data / SPEC_BENCH_FILE).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(lines[i * len(lines) // count]) for i in range(count)]
    reader = _Reader(folder)
    return [
        Prompt(f"{q['category']} {q['question_id']}", reader.read(q["turns"][0], chat=True)[:max_tokens])
        for q in questions
    ]


class _Reader:
    def __init__(self, folder: Path) -> None:
        bundle = load_bundle(folder)
        self._tokenizer = Tokenizer(bundle)
        self._template = ChatTemplate(bundle.chat_template or "", bundle.special_tokens)

    def read(self, text: str, chat: bool) -> tuple[int, ...]:
        if not chat:
            return tuple(self._tokenizer.encode(text))
        messages = [{"role": "user", "content": text}]
        rendered = self._template.render(messages, add_generation_prompt=True)
        return tuple(self._tokenizer.encode(rendered, add_special_tokens=False))
