"""What `make bench` writes: statistics that can be trusted, runs that resume, a page that is what the results say."""

from __future__ import annotations

import json
import random
import statistics
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import registry, report
from bench.journal import Journal
from bench.plots import Bars, Lines
from bench.ratios import Goal, mean, quantile, ratio
from bench.session import Result, Session


def test_an_interval_covers_the_true_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    truth = statistics.NormalDist(1.5, 0.2)
    covered = 0
    for _ in range(200):
        found = ratio([truth.inv_cdf(rng.uniform(1e-9, 1 - 1e-9)) for _ in range(25)], resamples=200)
        assert found.low <= found.median <= found.high
        covered += found.low <= 1.5 <= found.high
    assert 168 <= covered <= 194  # 90 % of 200, within what chance does once in a thousand


def test_the_interval_of_one_value_is_that_value_and_of_none_an_error() -> None:
    one = ratio([2.5])
    assert (one.median, one.low, one.high, one.count) == (2.5, 2.5, 2.5, 1)
    assert mean([1.0, 2.0, 6.0]).median == 3.0
    with pytest.raises(ValueError, match="at least one"):
        ratio([])


@pytest.mark.parametrize(
    ("goal", "values", "verdict"),
    [
        (Goal(1.6), [1.7, 1.8, 1.9], "met"),
        (Goal(1.6), [1.2, 1.5, 1.9], "missed"),  # far from 1: the median decides
        (Goal(0.97), [0.90, 0.96, 1.02], "within noise"),
        (Goal(0.97), [0.90, 0.91, 0.92], "missed"),  # the whole interval lies below
        (Goal(2, at_most=True, unit="ms"), [1.0, 1.5, 1.9], "met"),
        (Goal(1, at_most=True, unit="ms"), [0.9, 1.1, 1.2], "missed"),  # a time of 1 ms is no ratio near 1
    ],
)
def test_a_goal_near_one_is_missed_only_by_the_whole_interval(goal: Goal, values: list[float], verdict: str) -> None:
    assert ratio(values, goal).verdict == verdict


def test_quantiles_are_values_that_were_seen() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    keys = ["a", "b", "c"]
    first = Session("some", Journal(path, {"tokens": 8}), minutes=1)
    for key in first.todo(keys):
        first.record(key, {"value": key})
        if key == "b":
            break
    with path.open("a") as file:
        file.write('{"key": "c", "val')  # killed while it wrote

    second = Session("some", Journal(path, {"tokens": 8}), minutes=1)
    asked = []
    for key in second.todo(keys):
        asked.append(key)
        second.record(key, {"value": key})
    assert asked == ["c"]
    assert [row["value"] for row in second.rows] == keys
    assert Journal(path, {"tokens": 8}).rows.keys() == set(keys)


def test_what_other_settings_left_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    Journal(path, {"tokens": 8}).record("a", {"value": 1})
    other = Journal(path, {"tokens": 16})
    assert other.other_settings
    assert not other.rows
    assert not Journal(path, {"tokens": 8}).rows
    other.record("a", {"value": 2})
    assert not Journal(path, {"tokens": 16}, fresh=True).rows


def test_no_key_is_begun_that_the_time_does_not_suffice_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("bench.session.time.monotonic", lambda: now)
    session = Session("some", Journal(tmp_path / "some.jsonl", {}), minutes=1)
    done = []
    for key in session.todo([str(i) for i in range(10)]):
        now += 25
        done.append(key)
        session.record(key, {})
    assert done == ["0", "1"]  # the third would end at 75 s
    assert "2 of 10" in session.stopped_early


def _result() -> Result:
    return Result("Some benchmark", {"some.speedup": ratio([1.5, 1.7, 1.9], Goal(1.6))}, "A note.")


def test_a_report_holds_machine_command_raw_and_ratios_and_its_page_shows_them(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks"
    report.write("some", _result(), "python -m bench some", [{"key": "a", "value": 1}], ["abc"], results)
    content = json.loads((results / "some.json").read_text())
    assert {"machine", "command", "raw", "ratios"} <= content.keys()
    assert content["ratios"]["some.speedup"]["median"] == 1.7
    assert content["raw"] == [{"key": "a", "value": 1}]
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| `some.speedup` | 1.70 (1.50 to 1.90, n = 3) | at least 1.6 | met |" in page


def test_a_cpu_is_named_with_what_its_products_depend_on(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: AMD EPYC\nflags\t\t: fpu avx avx2 avx512f avx512_bf16\n")
    assert report.cpu_name(tmp_path / "cpuinfo") == "AMD EPYC with avx2 avx512f avx512_bf16"
    (tmp_path / "cpuinfo").write_text("model name\t: Neoverse\n")
    assert report.cpu_name(tmp_path / "cpuinfo") == "Neoverse"


@pytest.mark.slow  # importing matplotlib takes seconds
def test_plots_are_drawn_and_shown(tmp_path: Path) -> None:
    charts = (
        Bars("some_bars", "Speeds", "tokens per second", {"ours": [3.0, 4.0], "theirs": [1.0]}),
        Lines("some_lines", "Load", "streams", "tokens per second", {"ours": [(1, 1.0), (4, 3.0)]}, doubling=True),
    )
    results = tmp_path / "benchmarks"
    report.write("some", replace(_result(), charts=charts), "python -m bench some", [], [], results)
    page = (tmp_path / "benchmarks.md").read_text()
    for name in ("some_bars.png", "some_lines.png"):
        assert f"(benchmarks/{name})" in page
        assert _width((results / name).read_bytes()) > 600


def test_the_page_is_what_the_results_say() -> None:
    assert report.page_of(report.RESULTS).read_text() == report.page(report.RESULTS)


def test_every_plot_of_a_result_is_there() -> None:
    for path in report.RESULTS.glob("*.json"):
        for plot in json.loads(path.read_text()).get("plots", ()):
            assert (report.RESULTS / plot).is_file(), f"{path.name} names {plot}"


class _Bench:
    """Measures nothing, and is interrupted once."""

    __doc__ = "Some benchmark."

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.interrupted = False

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--prompts", type=int, default=3)

    def run(self, options: Any, session: Session) -> Result:
        for key in session.todo([str(i) for i in range(options.prompts)]):
            self.asked.append(key)
            if key == "1" and not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            session.record(key, {"value": 2.0})
        return Result("Some", {"some.ratio": ratio([row["value"] for row in session.rows])})


def test_the_set_goes_on_behind_what_it_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benches = {"first": _Bench(), "second": _Bench(), "third": _Bench()}
    benches["first"].interrupted = benches["third"].interrupted = True
    entries = {name: registry.Entry(name, 1.0, name != "third") for name in benches}
    monkeypatch.setattr(registry, "BENCHES", entries)
    monkeypatch.setattr(registry, "load", benches.__getitem__)
    out = ["--out", str(tmp_path / "results")]
    with pytest.raises(KeyboardInterrupt):
        command.main(out)
    assert command.main(out) == 0
    assert benches["first"].asked == ["0", "1", "2"]
    assert benches["second"].asked == ["0", "1", "1", "2"]
    assert not benches["third"].asked  # not of the default set
    content = json.loads((tmp_path / "results" / "second.json").read_text())
    assert content["command"] == f"python -m bench second --out {tmp_path / 'results'}"
    assert len(content["raw"]) == 3
    assert not list((tmp_path / "results").glob("*.jsonl"))


class _BenchOfModel(_Bench):
    def add_arguments(self, parser: Any) -> None:
        super().add_arguments(parser)
        parser.add_argument("--model", default="usual")


def test_results_of_another_model_lie_beside_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BENCHES", {"some": registry.Entry("some", 1.0)})
    bench = _BenchOfModel()
    bench.interrupted = True
    monkeypatch.setattr(registry, "load", lambda name: bench)
    for words in ([], ["--model", "usual"], ["--model", "/models/Other-1.5B"], ["--model", "other", "--label", "mine"]):
        assert command.main(["some", "--out", str(tmp_path / "results"), *words]) == 0
    found = {path.name for path in (tmp_path / "results").glob("*.json")}
    assert found == {"some.json", "some_other_1_5b.json", "some_mine.json"}


def test_the_default_set_fits_into_forty_minutes() -> None:
    minutes = sum(entry.minutes for entry in registry.BENCHES.values() if entry.in_default_set)
    assert minutes <= command.SET_MINUTES < 40


def _width(png: bytes) -> int:
    assert png.startswith(b"\x89PNG")
    width: int = struct.unpack(">I", png[16:20])[0]
    return width
