"""What the audit keeps can be decoded again: `outrider replay` against a faulty server and an honest one."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from outrider.v1 import generation_service_pb2_grpc as generation_grpc
from scheduler.audit import AuditCase, AuditConfig, Difference, Mismatch
from scheduler.errors import InvalidRequest
from scheduler.request import Finished, GenerationRequest, Speculation, SpeculationSummary
from services import generation_servicer
from services.audit_files import AuditFolder, InvalidAuditFile, as_dict, read
from services.channel import open_channel
from services.gateway import Gateway
from services.generation import TokenPrompt, UserRequest
from services.generation_servicer import GenerationServicer
from services.replay import Replayed, first_difference, replay
from services.server import Server, ServerConfig
from services.settings import SchedulerSettings, load
from services.validation import check_request, check_token_ids
from specdec.commit import FinishReason
from specdec.params import AcceptRule, Grammar, GrammarKind, SamplingParams, StopConditions
from tools.cases import GREEDY, SAMPLED
from tools.deployment import Deployment, quick_config
from tools.planted import shift_verify_rows
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.up import ROOT, environment
from tools.waiting import until

LAW = TableLaw()
EVERY = AuditConfig(share=1.0, poll=0.01)
EDITED = replace(
    SAMPLED,
    seed=2**64 - 1,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=-0.1,
    logit_bias=((3, 1.5),),
    bad_words=((4,), (5, 6)),
    allowed_token_ids=tuple(range(50)),
)


@asynccontextmanager
async def served(system: Deployment) -> AsyncIterator[str]:
    """The system's gateway behind a socket; yields the address."""
    server = Server(ServerConfig(("127.0.0.1:0",)))
    servicer = GenerationServicer(Gateway(system.scheduler))
    generation_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
    (address,) = await server.start((generation_servicer.SERVICE_NAME,))
    try:
        yield address
    finally:
        await server.drain(0)


async def outrider(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


async def replayed(address: str, path: Path) -> Replayed:
    channel = open_channel(address)
    try:
        return await replay(channel, read(path))
    finally:
        await channel.close(None)


def found_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, EDITED], ids=["greedy", "sampled", "edited"])
async def test_a_file_shows_the_fault_while_it_is_there_and_none_once_it_is_gone(
    sampling: SamplingParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift_verify_rows(monkeypatch)
    drafts = [TableDrafter(LAW, 0.7)]
    async with (
        Deployment([TableModel(LAW)], drafts, quick_config(), audit=EVERY, on_mismatch=AuditFolder(tmp_path)) as system,
        served(system) as address,
    ):
        request = GenerationRequest(
            (1, 2, 3), sampling, max_tokens=24, min_tokens=4, stop_token_ids=frozenset({17}), draft_length=3
        )
        answer = await system.generate(request)
        await until(lambda: bool(found_in(tmp_path)), "the audit wrote a file")
        (path,) = found_in(tmp_path)
        await system.idle()

        faulty = await replayed(address, path)
        code, out, _ = await outrider("replay", str(path), "--address", address)
        monkeypatch.undo()
        honest = await replayed(address, path)
        right = await system.generate(replace(request, speculation=Speculation.OFF))
        honest_code, honest_out, _ = await outrider("replay", str(path), "--address", address, "--json")

    assert faulty.served == faulty.speculative == tuple(answer.token_ids)
    assert faulty.plain == honest.plain == honest.speculative == tuple(right.token_ids)
    assert faulty.differ_at == read(path).position
    assert honest.differ_at is None
    assert code == 1
    assert f"DIFFERENT from token {faulty.differ_at} on" in out
    assert f"{len(answer.token_ids)} tokens, as it was served" in out
    assert honest_code == 0
    assert json.loads(honest_out)["differ_at"] is None


def mismatch(request: GenerationRequest, margin: float | None = 0.25) -> Mismatch:
    stop = StopConditions(2, 12, 2 + request.min_tokens, request.stop_token_ids)
    finished = Finished(FinishReason.LENGTH, 2, 3, SpeculationSummary(), 1.0, 0.1)
    case = AuditCase("sequence", replace(request, model="table"), stop, (5, 6, 7), finished, "target-0")
    return Mismatch(case, Difference(1, 6, 8, margin), (5, 8), "target-1", 0.0)


def test_a_file_holds_the_whole_request(tmp_path: Path) -> None:
    request = GenerationRequest(
        (1, 2), EDITED, max_tokens=10, min_tokens=3, stop_token_ids=frozenset({9, 8}), draft_length=6
    )
    message = read(AuditFolder(tmp_path).write(mismatch(request))).request

    assert list(message.tokens.token_ids) == [1, 2]
    assert (message.model, message.max_tokens, message.min_tokens, message.draft_length) == ("table", 10, 3, 6)
    assert message.seed == 2**64 - 1
    assert message.temperature == pytest.approx(0.8)
    assert (list(message.stop_token_ids), message.ignore_eos) == ([8, 9], True)
    assert [(bias.token_id, bias.bias) for bias in message.logit_bias] == [(3, 1.5)]
    assert [list(word.token_ids) for word in message.bad_word_ids] == [[4], [5, 6]]
    assert len(message.allowed_token_ids) == 50


def test_a_grammar_is_replayed_without_what_the_api_takes_beside_none(tmp_path: Path) -> None:
    """Every field that the API refuses beside a grammar was empty in the request itself."""
    sampling = replace(GREEDY, grammar=Grammar(GrammarKind.CHOICE, '["yes", "no"]'))
    message = read(AuditFolder(tmp_path).write(mismatch(GenerationRequest((1, 2), sampling)))).request

    assert list(message.grammar.choice.texts) == ["yes", "no"]
    assert not message.ignore_eos
    assert not message.HasField("min_tokens")


@pytest.mark.parametrize("margin", [None, float("inf"), 0.5])
def test_a_file_is_strict_json(margin: float | None) -> None:
    assert json.dumps(as_dict(mismatch(GenerationRequest((1, 2)), margin)), allow_nan=False)


def test_files_are_for_their_owner_only_and_the_oldest_make_room(tmp_path: Path) -> None:
    folder = AuditFolder(tmp_path / "audit", max_files=3)
    written = [folder.write(mismatch(GenerationRequest((1, 2)))) for _ in range(5)]

    assert found_in(tmp_path / "audit") == written[-3:]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written[-3:]} == {0o600}


def test_of_a_file_that_could_not_be_written_whole_nothing_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_full_disk(descriptor: int, mode: str, encoding: str) -> IO[Any]:
        os.close(descriptor)
        return open("/dev/full", mode, encoding=encoding)

    monkeypatch.setattr(os, "fdopen", on_full_disk)
    assert "could not be kept" in AuditFolder(tmp_path)(mismatch(GenerationRequest((1, 2))))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert "could not be kept" in AuditFolder(tmp_path / "file")(mismatch(GenerationRequest((1, 2))))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("{", "not JSON"),
        ("[]", "not an audit file"),
        ('{"format": 2}', "not an audit file of format 1"),
        ('{"format": 1, "request": {"nothing": 1}, "served": {"token_ids": []}}', "damaged"),
        ('{"format": 1, "request": {}}', "damaged"),
    ],
)
async def test_a_file_that_is_none_is_wrong_use(content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(InvalidAuditFile, match=words):
        read(path)


async def test_a_wrong_file_and_a_missing_server_are_one_line_each(tmp_path: Path) -> None:
    code, _, errors = await outrider("replay", str(tmp_path / "nothing.json"))
    assert (code, errors.count("\n")) == (2, 1)
    assert "cannot read" in errors

    path = AuditFolder(tmp_path).write(mismatch(GenerationRequest((1, 2))))
    code, _, errors = await outrider("replay", str(path), "--address", "127.0.0.1:1")
    assert (code, errors.count("\n")) == (1, 1)
    assert "no server at 127.0.0.1:1" in errors


@pytest.mark.parametrize(
    ("one", "other", "position"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), None)],
)
def test_the_first_difference_of_two_answers(
    one: tuple[int, ...], other: tuple[int, ...], position: int | None
) -> None:
    assert first_difference(one, other) == position


def test_settings_reach_the_audit() -> None:
    flags = {"audit_share": 0.5, "audit_noise": 0.25, "audit_log_content": True}
    settings = load(SchedulerSettings, None, flags).settings

    assert settings.audit_config() == AuditConfig(share=0.5, noise=0.25, log_content=True)
    assert load(SchedulerSettings).settings.audit_config() == AuditConfig(share=0.01, noise=None)


@pytest.mark.parametrize("words", [((64,),), ((1,), (2, 64)), ((),), ((1,),) * 513])
def test_bad_words_as_token_ids_are_refused_by_name(words: tuple[tuple[int, ...], ...]) -> None:
    request = UserRequest(TokenPrompt((1,)), bad_word_ids=words)

    with pytest.raises(InvalidRequest) as refused:
        check_request(request, AcceptRule.INVARIANT)
        check_token_ids(request, 64)
    assert refused.value.field == "bad_word_ids"
