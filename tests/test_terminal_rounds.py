"""`outrider top`, `explain`, `trace` and `report` against a running system, read as a person or a program would."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from outrider.v1 import control_service_pb2 as pb
from outrider.v1.types_pb2 import TokenSource
from scheduler.config import Policy
from scheduler.request import GenerationRequest, Speculation
from services.cli.lanes import LABEL, draw, lanes_of
from services.cli.main import run
from specdec.params import SamplingParams
from tools.deployment import quick_config
from tools.page_system import LAW, PageSystem, page_system, scripted
from tools.scripted import WrongFrom

REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=40, request_id="r-1")
Capture = pytest.CaptureFixture[str]


async def outrider(capsys: Capture, system: PageSystem, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and error. In a thread, since each command has an event loop of its own."""
    capsys.readouterr()
    code = await asyncio.to_thread(run, [*arguments, "--address", system.address])
    return code, *capsys.readouterr()


async def test_explain_shows_each_round_and_says_that_fixed_gives_no_reasons(capsys: Capture) -> None:
    async with page_system([scripted(WrongFrom(3, LAW.vocabulary_size))], quick_config(5)) as system:
        await system.deployment.generate(REQUEST)
        code, out, err = await outrider(capsys, system, "explain", "r-1")
        assert code == 0
        assert len(re.findall(r"3 of 5", out)) == 9
        assert "placed on target-0 with draft-0" in out
        assert "acceptance by depth" not in out
        assert "threshold and fixed" in err
        assert "policy: goodput" in err
        assert "finished with 40 tokens" in err
        await system.deployment.generate(replace(REQUEST, speculation=Speculation.OFF))
        _, out, err = await outrider(capsys, system, "explain", "last")
        assert out.count("plain") == 40
        assert "no drafter" in err
        code, out, err = await outrider(capsys, system, "explain", "nothing")
        assert (code, out) == (1, "")
        assert err == "error: nothing is known of 'nothing': only the latest requests are remembered\n"


async def test_explain_shows_what_goodput_decided_from(capsys: Capture) -> None:
    config = quick_config(5, Policy.GOODPUT)
    async with page_system([scripted(WrongFrom(3, LAW.vocabulary_size))], config) as system:
        answer = await system.deployment.generate(replace(REQUEST, max_tokens=120))
        explained = system.deployment.scheduler.explained(answer.started.sequence_id)
        code, out, err = await outrider(capsys, system, "explain", "last")
        _, content, _ = await outrider(capsys, system, "explain", answer.started.sequence_id, "--json")
    assert code == 0
    assert all(word in out for word in ("chosen", "expected", "acceptance by depth", "T verify", "T draft", "link"))
    assert "first to know what a plain step takes" in out
    assert "no reasons" not in err
    steps = [entry["step"] for entry in json.loads(content)["sequences"][0]["entries"] if "step" in entry]
    told = {(s["decision"]["draft_length"], s["decision"]["goodput"]) for s in steps}
    assert told <= {(one.decision.draft_length, one.goodput) for one in explained}
    assert any(goodput > 0 for _, goodput in told)
    assert not any("token_ids" in key for step in steps for key in step)


async def test_trace_draws_lanes_that_fit_the_width(capsys: Capture) -> None:
    async with page_system([scripted(WrongFrom(3, LAW.vocabulary_size))], quick_config(5)) as system:
        await system.deployment.generate(REQUEST)
        code, out, _ = await outrider(capsys, system, "trace", "r-1", "--width", "90")
        wrong, _, err = await outrider(capsys, system, "trace", "r-1", "--width", "9")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 90
    for lane in ("draft", "wire", "verify", "tokens"):
        assert f"\n{lane}" in out
    shown = "".join(line[LABEL:] for line in out.splitlines() if line.startswith("tokens"))
    assert shown.count("●") == 30
    assert shown.count("◆") + shown.count("+") == 10
    assert wrong == 2
    assert "--width" in err


def test_lanes_put_each_thing_where_it_was() -> None:
    draft = pb.DraftTimes(num_candidates=4, draft_worker="d", asked_at=0.0, arrived_at=0.030, draft_time=0.020)
    sources = [TokenSource.TOKEN_SOURCE_ACCEPTED] * 2 + [TokenSource.TOKEN_SOURCE_CORRECTION]
    step = pb.TargetStep(number=1, sources=sources, began_at=0.030, step_time=0.020, num_draft_tokens=4, draft=draft)
    plain = pb.TargetStep(sources=[TokenSource.TOKEN_SOURCE_PLAIN], began_at=0.060, step_time=0.010)
    stale = pb.DraftTimes(num_candidates=4, draft_worker="d", arrived_at=0.060, draft_time=0.010, ahead=True)
    sequence = pb.SequenceRounds(
        entries=[
            pb.SequenceEntry(at=0.050, step=step),
            pb.SequenceEntry(at=0.060, stale=pb.StaleDraft(draft=stale)),
            pb.SequenceEntry(at=0.070, step=plain),
            pb.SequenceEntry(at=0.070, fell_back=pb.Fallback(reason="late")),
        ]
    )
    lanes = {lane.name: lane.strip(0, 20).plain for lane in draw(sequence, 0.005)}
    assert lanes["draft"] == "draft    ▒▒▒▒     ××"
    assert lanes["wire"] == "wire    ┄    ┄"
    assert lanes["verify"] == "verify        ████  ░░"
    assert lanes["tokens"] == "tokens           ●●◆ ·"
    assert lanes[""].rstrip().endswith("!late")
    drawn = list(lanes_of(sequence, 28, 0.005))
    assert all(isinstance(line, Text) and len(line.plain) <= 28 for line in drawn)


async def test_top_once_shows_figures_and_workers_and_json_the_same(capsys: Capture) -> None:
    async with page_system([scripted(WrongFrom(3, LAW.vocabulary_size))], quick_config(5)) as system:
        await system.deployment.generate(REQUEST)
        code, out, _ = await outrider(capsys, system, "top", "--once")
        _, content, _ = await outrider(capsys, system, "top", "--json")
    assert code == 0
    assert re.search(r"candidate +3 █+ 100%", out)
    assert re.search(r"candidate +4 ░+ 0%", out)
    assert "mode speculative: the policies threshold and fixed" in out
    assert "target-0" in out
    assert "draft-0" in out
    figures = json.loads(content)["figures"]
    assert figures["acceptance_per_position"] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert figures["rounds"] == "10"
    assert json.loads(content)["status"]["workers"][0]["state"] == "ready"


async def test_report_of_a_deployment_and_of_benchmarks_needs_nothing_else(capsys: Capture, tmp_path: Path) -> None:
    result = {
        "title": "<b>Bold</b> claims",
        "command": "python -m bench",
        "machine": {"cpu": "x"},
        "ratios": {"a.b": {"median": 1.5, "low": 1.25, "high": 1.75, "count": 12, "goal": "at least 1.2"}},
    }
    (tmp_path / "good.json").write_text(json.dumps(result))
    (tmp_path / "bad.json").write_text(json.dumps({"title": "x"}))
    page = tmp_path / "page.html"
    async with page_system([scripted(WrongFrom(3, LAW.vocabulary_size))], quick_config(5)) as system:
        answer = await system.deployment.generate(REQUEST)
        code, _, err = await outrider(capsys, system, "report", "-o", str(page))
        live = page.read_text()
        assert (code, err) == (0, f"wrote {page}\n")
        _, bench, _ = await outrider(capsys, system, "report", str(tmp_path / "good.json"), "-o", "-")
        code, _, err = await outrider(capsys, system, "report", str(tmp_path / "bad.json"), "-o", "-")
    assert answer.started.sequence_id in live
    assert live.count('<rect class="verify"') == 10
    assert "30 accepted" in live
    assert "&lt;b&gt;Bold&lt;/b&gt; claims" in bench
    assert "1.25 to 1.75" in bench
    assert code == 2
    assert "bad.json is no benchmark result" in err
    for text in (live, bench):
        assert not re.search(r"""(?:src|href)=|url\(|https?://|<script""", text)


def test_every_committed_result_makes_a_report(capsys: Capture) -> None:
    results = sorted(str(path) for path in (Path(__file__).parents[1] / "docs" / "benchmarks").glob("*.json"))
    assert run(["report", *results, "--output", "-"]) == 0
    assert capsys.readouterr().out.count("<section>") == len(results)
