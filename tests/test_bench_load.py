"""The benchmark of concurrent requests: who is compared with whom, in which order, and what an early end leaves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bench import load
from bench.contestants import Batching, ContestantFailed, Question
from bench.journal import Journal
from bench.session import Session


class Clocked:
    """Answers so many tokens a second; says in `asked` who was asked when."""

    def __init__(self, name: str, speed: float, asked: list[str], lost: int = 0) -> None:
        self.name = name
        self._speed = speed
        self._asked = asked
        self._lost = lost

    async def batch(self, questions: Sequence[Question]) -> tuple[list[list[int]], float]:
        self._asked.append(self.name)
        answers = [list(range(question.tokens - self._lost)) for question in questions]
        return answers, sum(map(len, answers)) / self._speed


SPEEDS = {"plain": 90.0, "speculative": 95.0, "vllm_plain": 100.0, "vllm_server": 60.0}


def _options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)
    return parser.parse_args(["--streams", "1", "4", *words])


def _take_part(monkeypatch: pytest.MonkeyPatch, contestants: list[Batching]) -> None:
    async def found(options: argparse.Namespace, session: Session, stack: AsyncExitStack) -> list[Batching]:
        return contestants

    monkeypatch.setattr(load, "_contestants", found)


def test_ours_is_held_against_a_service_and_a_library_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    _take_part(monkeypatch, [Clocked(name, speed, asked) for name, speed in SPEEDS.items()])
    session = Session("load", Journal(tmp_path / "load.jsonl", {}), minutes=1)
    result = load.run(_options("--prompts", "2", "--tokens", "8"), session)
    for n in (1, 4):
        library, service = (
            result.ratios[f"load.plain_vs_vllm_plain.{n}"],
            result.ratios[f"load.plain_vs_vllm_server.{n}"],
        )
        assert (library.median, library.goal, library.verdict) == (0.9, "at least 1", "missed")
        assert (service.median, service.goal, service.verdict) == (1.5, "at least 1", "met")
        assert {f"load.tokens_per_second.{name}.{n}" for name in SPEEDS} <= result.ratios.keys()
    for words in ("smollm2-135m", "8 tokens", "2 rounds"):
        assert words in result.notes
    names = list(SPEEDS)
    measured = asked[len(names) :]  # behind a first word to each
    assert measured == names * 2 + (names[1:] + names[:1]) * 2


def test_a_run_that_ends_early_tells_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "load.jsonl", {})
    journal.record("round 0, 1 streams", {"streams": 1, "speeds": SPEEDS})
    session = Session("load", journal, minutes=1)
    monkeypatch.setattr(session, "todo", lambda keys: iter(()))
    _take_part(monkeypatch, [])
    ratios = load.run(_options(), session).ratios
    assert ratios["load.plain_vs_vllm_server.1"].median == 1.5
    assert not any(key.endswith(".4") for key in ratios)


def test_an_answer_that_is_too_short_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _take_part(monkeypatch, [Clocked("plain", 90.0, []), Clocked("vllm_server", 60.0, [], lost=1)])
    session = Session("load", Journal(tmp_path / "load.jsonl", {}), minutes=1)
    with pytest.raises(ContestantFailed, match="vllm_server answered with 7 tokens, was asked for 8"):
        load.run(_options("--tokens", "8"), session)
    assert not session.rows
