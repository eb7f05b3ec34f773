"""A target over several ranks says what one process says, and its ranks live and die together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import yaml

from outrider import AsyncClient
from scheduler.request import GenerationRequest
from specdec.engine.errors import ModelRefused
from specdec.engine.layout import SequenceRows, pack
from specdec.engine.loading import load
from specdec.engine.parallel import check_heads
from specdec.engine.parallel_batch import decode_batch, encode_batch
from specdec.params import SamplingParams
from tools.engine import VOCABULARY, draw_tokens, tiny_model
from tools.identities import tokenizer_json, words
from tools.real_system import RealTarget
from tools.up import Up
from tools.waiting import PATIENCE

TOKENS = 40
REQUESTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with small random weights whose heads two ranks can share, and a tokenizer of made-up words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("Llama").save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json(words(VOCABULARY)))
    return folder


@dataclass(frozen=True, slots=True)
class Deployed:
    up: Up
    references: list[tuple[int, ...]]


def params(i: int) -> SamplingParams:
    """Every other one is greedy."""
    return SamplingParams(temperature=0.0 if i % 2 == 0 else 0.8, seed=i)


def prompt(i: int) -> list[int]:
    return draw_tokens(20 + i, seed=i)


async def plain_answers(folder: Path) -> list[tuple[int, ...]]:
    """What one process says to the requests, plainly."""
    runner = load(folder, dtype="fp32", threads=1, kv_memory=2**26)
    async with RealTarget(runner) as target:
        system = await target.system()
        requests = [GenerationRequest(tuple(prompt(i)), params(i), max_tokens=TOKENS) for i in range(REQUESTS)]
        answers = await asyncio.gather(*(system.plain(request) for request in requests))
    return [tuple(answer.token_ids) for answer in answers]


async def served_answers(address: str) -> tuple[list[tuple[int, ...]], int]:
    """Token ids of all requests at once, and how many candidates were accepted."""
    async with AsyncClient(address) as client:
        completions = await asyncio.gather(
            *(
                client.complete(
                    token_ids=prompt(i),
                    temperature=params(i).temperature,
                    seed=i,
                    max_tokens=TOKENS,
                    ignore_eos=True,
                    speculation="on",
                )
                for i in range(REQUESTS)
            )
        )
    accepted = sum(completion.finished.speculation.num_accepted_tokens for completion in completions)
    return [completion.token_ids for completion in completions], accepted


@pytest.fixture(scope="module")
def deployed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Two ranks, and the same model as drafter. Trees, so that kept branches are moved on both ranks."""
    config = tmp_path_factory.mktemp("settings") / "outrider.yaml"
    config.write_text(yaml.safe_dump({"scheduler": {"policy": "fixed", "draft_length": 4, "width": 2}}))
    arguments = ["--config", str(config), "--model", str(folder), "--draft-model", str(folder), "--dtype", "fp32"]
    arguments += ["--tensor-parallel", "2", "--threads", "1", "--kv-memory", "64MiB"]
    with Up(*arguments, target="", draft="", patience=90.0) as up:
        references = asyncio.run(plain_answers(folder))
        up.wait_ready()
        yield Deployed(up, references)


def rank_1(up: Up) -> psutil.Process:
    return next(process for process in up.family() if process.environ().get("RANK") == "1")


@pytest.mark.slow
def test_two_ranks_say_what_one_process_says_with_speculation_on(deployed: Deployed) -> None:
    answers, accepted = asyncio.run(served_answers(deployed.up.address))
    differing = [i for i, pair in enumerate(zip(answers, deployed.references, strict=True)) if pair[0] != pair[1]]
    assert differing == []
    assert accepted > REQUESTS * TOKENS // 3


@pytest.mark.slow
def test_a_killed_rank_takes_the_worker_with_it_and_both_start_again(deployed: Deployed) -> None:
    old = rank_1(deployed.up)
    old.send_signal(signal.SIGKILL)
    deployed.up.wait_for(r"^\[target-1\] error: rank 1 ended with signal SIGKILL")
    deployed.up.wait_for(r"^\[scheduler\] .* target worker target-1 is connected")
    assert rank_1(deployed.up).pid != old.pid
    answers, _ = asyncio.run(served_answers(deployed.up.address))
    assert answers == deployed.references


@pytest.mark.slow
def test_all_ranks_end_with_the_deployment(deployed: Deployed) -> None:
    family = deployed.up.family()
    deployed.up.interrupt()
    assert deployed.up.end() == 0
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert alive == []


@pytest.mark.parametrize("parents", [None, (-1, 0, 0, 2, -1)])
def test_a_batch_arrives_as_it_was_sent(parents: tuple[int, ...] | None) -> None:
    slots = np.arange(64, dtype=np.int64) + 32
    long = SequenceRows(draw_tokens(40), None, 20, slots)
    tree = SequenceRows(draw_tokens(5), parents, 9, slots)
    layout = pack([long, tree], torch.device("cpu"))
    arrived, wanted = decode_batch(encode_batch(layout, [3, 44]), torch.device("cpu"))
    assert wanted == [3, 44]
    for name in ("token_ids", "positions", "write_slots", "place_of_row"):
        assert torch.equal(getattr(arrived, name), getattr(layout, name))
    assert len(arrived.groups) == len(layout.groups)
    for ours, theirs in zip(arrived.groups, layout.groups, strict=True):
        assert torch.equal(ours.key_slots, theirs.key_slots)
        assert torch.equal(ours.positions, theirs.positions)
        assert torch.equal(ours.rows, theirs.rows)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks", "fits"), [(6, 2, 2, True), (9, 3, 2, False), (8, 2, 4, False)])
def test_heads_that_cannot_be_divided_are_refused_by_name(heads: int, kv_heads: int, ranks: int, fits: bool) -> None:
    text = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    config = SimpleNamespace(get_text_config=lambda: text)
    if fits:
        check_heads(config, "tiny", ranks)
    else:
        with pytest.raises(ModelRefused, match=f"tiny has {heads} attention heads and {kv_heads} KV heads"):
            check_heads(config, "tiny", ranks)
