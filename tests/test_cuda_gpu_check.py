"""The GPU check can fail, tells what it found, and runs as a whole on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu_checks import Reference, check_answers, check_draws, check_logits, check_noise, check_reference
from bench.gpu_report import Findings
from specdec import noise
from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.engine.varlen import REFERENCE
from tools.engine import draw_tokens, tiny_model

PROMPTS = [draw_tokens(12, seed=i) for i in range(2)]


class Late(ModelRunner):
    """Verifies give the logits of other rows."""

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        return [part.roll(1, dims=0) for part in super().forward(segments)]


def runner_of(kind: type[ModelRunner]) -> ModelRunner:
    return kind(
        tiny_model("Llama"), name="tiny", vocabulary_size=160, context_length=256, kv_blocks=60, paged=REFERENCE
    )


def findings() -> Findings:
    return Findings(deadline=float("inf"))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return check_reference(findings(), runner_of(ModelRunner).model, draw_tokens(40))


@pytest.mark.parametrize(("kind", "passes"), [(ModelRunner, True), (Late, False)])
def test_wrong_logits_are_found(reference: Reference, kind: type[ModelRunner], passes: bool) -> None:
    found = findings()
    check_logits(found, runner_of(kind), "tiny", reference)
    assert found.passed is passes


@pytest.mark.parametrize(("kind", "passes"), [(ModelRunner, True), (Late, False)])
def test_answers_that_speculation_changes_are_found(kind: type[ModelRunner], passes: bool) -> None:
    found = findings()
    check_answers(found, runner_of(kind), "tiny", PROMPTS, 12, near_tie=1e-4)
    assert found.passed is passes


def test_other_noise_and_other_draws_are_found(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = findings(), findings()
    check_noise(right, "cpu", 500)
    check_draws(right, reference.stock)
    true = noise.exponential_rows
    shifted = lambda places, size, device: true([(s, p + 1) for s, p in places], size, device)  # noqa: E731
    monkeypatch.setattr("specdec.noise.exponential_rows", shifted)
    monkeypatch.setattr("specdec.sampling.exponential_rows", shifted)
    check_noise(wrong, "cpu", 500)
    check_draws(wrong, reference.stock)
    assert [check.passed for check in right.checks] == [True, True]
    assert [check.passed for check in wrong.checks] == [False, False]


def test_no_check_is_no_pass_and_late_figures_are_named(tmp_path: Path) -> None:
    found = Findings(deadline=0.0)
    assert not found.passed
    assert not found.has_time_for("decoding.1")
    found.check("one", True, "fine")
    found.write(tmp_path / "deep" / "out.json", {"command": "c"})
    written = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert written["skipped"] == ["decoding.1"]
    assert written["checks"] == [{"name": "one", "passed": True, "detail": "fine"}]
    assert "no time was left" in found.table()


def test_a_device_that_is_not_there_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main(["--device", "cuda"]) == 2
    assert "device is cuda, but torch finds 0 CUDA devices" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_script_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert gpu_check.main(["--tiny", "--device", "cpu", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert {"tokens_per_second.assisted", "ratio.speculative_vs_plain.4", "forward_ms.block tables.4x6"} <= set(figures)
    assert "draws on the device are the CPU's" in capsys.readouterr().out
