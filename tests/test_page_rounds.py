"""What is remembered of rounds: the truth, not too much of it, and without ever waiting for who looks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.entries import Admitted, Dropped, Ended, Entry, Step
from scheduler.request import GenerationRequest, Speculation, SpeculationSummary
from services.rounds import LATEST, RoundStore
from services.rounds_figures import LiveFigures
from services.rounds_text import NO_DRAFTER
from specdec.commit import FinishReason
from specdec.params import SamplingParams
from tools.deployment import Deployment, quick_config
from tools.page_system import LAW, scripted
from tools.scripted import WrongFrom, oracle
from tools.table_model import TableModel

REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=40, request_id="r-1")


def admitted(name: str, request_id: str = "") -> Admitted:
    return Admitted(name, 0.0, "m", 3, request_id)


def ended(name: str) -> Ended:
    return Ended(name, 1.0, 1, FinishReason.LENGTH, SpeculationSummary())


async def test_the_store_finds_by_sequence_by_request_and_the_latest() -> None:
    store = RoundStore()
    async with Deployment([TableModel(LAW)], [scripted(oracle)], readers=[store.read]) as deployment:
        first = await deployment.generate(REQUEST)
        second = await deployment.generate(REQUEST)
        third = await deployment.generate(replace(REQUEST, request_id="r-2"))
    ids = [answer.started.sequence_id for answer in (first, second, third)]
    assert [one.admitted.sequence_id for one in store.find("r-1")] == ids[:2]
    assert [one.admitted.sequence_id for one in store.find(ids[1])] == [ids[1]]
    assert [one.admitted.sequence_id for one in store.find(LATEST)] == [ids[2]]
    assert store.find("r-3") == []
    assert isinstance(store.find(ids[0])[0].entries[-1], Ended)


def test_the_store_forgets_ended_sequences_first_and_is_bounded() -> None:
    store = RoundStore(max_entries=20, max_ended=3)
    store.read(admitted("runs"))
    for i in range(10):
        store.read(admitted(f"e{i}"))
        store.read(ended(f"e{i}"))
    assert [one.admitted.sequence_id for one in store.sequences() if one.entries] == ["e7", "e8", "e9"]
    for _ in range(100):
        store.read(Dropped("runs", 2.0))
    (runs,) = store.sequences()
    assert len(runs.entries) == 19
    assert runs.forgotten == 81


async def test_a_slow_reader_loses_the_oldest_and_is_told_how_many() -> None:
    store = RoundStore(max_waiting=5)
    store.read(admitted("s"))
    with store.feed() as feed:
        for i in range(12):
            store.read(Dropped("s", float(i)))
        taken = await feed.take(1.0)
        assert [entry.at for entry in taken] == [7.0, 8.0, 9.0, 10.0, 11.0]
        assert feed.lost == 7
        store.close()
        assert await feed.take(10.0) == []
        assert feed.closed


@pytest.mark.parametrize("window", [1, 3])
async def test_acceptance_by_position_is_what_was_scripted(window: int) -> None:
    """Candidates 1 to 3 right, the fourth wrong: 100, 100, 100, 0, 0 percent, with stale blocks between and without."""
    store = RoundStore()
    config = replace(quick_config(5), window=window)
    drafter = scripted(WrongFrom(3, LAW.vocabulary_size))
    async with Deployment([TableModel(LAW, delay=0.01)], [drafter], config, readers=[store.read]) as deployment:
        answer = await deployment.generate(REQUEST)
    assert answer.finished is not None
    figures, speculation = store.figures.figures(), answer.finished.speculation
    assert figures.acceptance_per_position == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert figures.acceptance_rate == speculation.acceptance_rate
    assert figures.tokens_per_verify == speculation.mean_acceptance_length
    assert figures.counts.tokens == len(answer.token_ids)
    assert figures.counts.stale_blocks == speculation.num_stale_blocks
    assert (figures.counts.stale_blocks > 0) == (window > 1)
    steps = [entry for entry in store.find(LATEST)[0].entries if isinstance(entry, Step)]
    assert all(step.draft is not None for step in steps if step.num_draft_tokens)


async def test_figures_tell_mode_and_why_and_forget() -> None:
    now = [1000.0]
    figures = LiveFigures(clock=lambda: now[0])
    assert figures.figures().mode == "idle"
    read: list[Entry] = []
    async with Deployment([TableModel(LAW)], [scripted(oracle)], readers=[read.append]) as deployment:
        await deployment.generate(replace(REQUEST, speculation=Speculation.OFF))
        plain = len(read)
        await deployment.generate(REQUEST)
    for entry in read[:plain]:
        figures.read(entry)
    seen = figures.figures()
    assert (seen.mode, seen.reason, seen.counts.rounds, seen.counts.plain_steps) == ("plain", NO_DRAFTER, 0, 40)
    assert seen.plain_rate is not None
    assert seen.plain_rate > 0
    for entry in read[plain:]:
        figures.read(entry)
    assert figures.figures().mode == "mixed"
    now[0] += 30
    assert sum(tokens for tokens, _ in figures.by_second()) == 80
    later = figures.figures(10)
    assert (later.mode, later.counts.tokens, later.plain_rate) == ("idle", 0, seen.plain_rate)
