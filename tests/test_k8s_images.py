"""The images: what Dockerfiles promise, and their very install steps run in a clean folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.version import __version__
from tools.dockerfile import Build, context, instruction, read_dockerfile
from tools.manifest import ROOT, Json, Manifest, containers

DOCKERFILES = (ROOT / "Dockerfile", ROOT / "Dockerfile.cuda")
IMAGES = {("Dockerfile", "scheduler"), ("Dockerfile", "worker"), ("Dockerfile", "ray"), ("Dockerfile.cuda", "worker")}
OF_BASE = {"outrider-scheduler", "outrider-worker"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(("file", "target"), sorted(IMAGES))
def test_an_image_has_a_pinned_base_and_runs_as_nobody_in_particular(file: str, target: str) -> None:
    arguments, stages = read_dockerfile(ROOT / file)
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+", arguments["PYTHON_IMAGE"])
    stage = stages[target]
    runtime = stages.get(stage.base, stage)
    assert runtime.base == "${PYTHON_IMAGE}"  # nothing of the build stages but what is copied
    assert (stage.last("USER") or runtime.last("USER")) == "10001:10001"
    assert instruction(stages, target, "ENTRYPOINT") == ["outrider"]


def test_the_context_is_what_the_wheel_is_made_of() -> None:
    names = {file.parts[0] for file in context()}
    assert {"pyproject.toml", "constraints.txt", "services", "outrider"} <= names
    assert names.isdisjoint({".git", ".venv", "tests", "bench", "docs", "k8s"})
    assert not [file for file in context() if file.suffix == ".pyc"]


def test_the_manifests_name_the_images_of_this_version() -> None:
    manifest = Manifest.render(ROOT / "k8s" / "base")
    names = {str(c["image"]) for item in workloads(manifest) for c in containers(item["spec"]["template"]["spec"])}
    ours = {name for name in names if name.startswith("outrider")}
    assert ours == {f"{name}:{__version__}" for name in OF_BASE}
    for path in DOCKERFILES:
        tags = re.findall(r"--tag \S+:(\S+)", path.read_text())
        assert set(tags) == {__version__}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_scheduler_image_installs_and_holds_no_torch(tmp_path: Path) -> None:
    root = Build(ROOT / "Dockerfile", tmp_path).build("scheduler")
    assert not list(root.glob("opt/outrider/lib/python*/site-packages/torch"))
    megabytes = sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) / 2**20
    assert megabytes < 250, f"{megabytes:.0f} MiB"
    settings = run_inside(root, "config", "show", "scheduler")
    assert "grpc_port" in settings
    check = "import services.scheduler_process, services.http.process, sys; print('torch' in sys.modules)"
    assert run_python(root, check).strip() == "False"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_worker_image_installs_and_loads_torch(tmp_path: Path) -> None:
    """torch from the package index at hand, which has the build for this machine."""
    root = Build(ROOT / "Dockerfile", tmp_path, {"TORCH_INDEX_URL": ""}).build("worker")
    assert "outrider target" in run_inside(root, "target", "--help")
    check = "import services.target_process, specdec.engine.loading, torch, pip; print(torch.__version__)"
    assert run_python(root, check).startswith("2.")


def run_inside(root: Path, *arguments: str) -> str:
    """The image's `outrider`, in its own environment, outside of the checkout."""
    return run([str(root / "opt/outrider/bin/outrider"), *arguments], root)


def run_python(root: Path, program: str) -> str:
    return run([str(root / "opt/outrider/bin/python"), "-c", program], root)


def run(command: list[str], root: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": "/dev/null/home", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def workloads(manifest: Manifest) -> list[Json]:
    return manifest.of_kind("Deployment", "StatefulSet")
