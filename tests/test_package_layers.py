"""Imports go one way, and no torch is loaded where none is needed. What import-linter cannot see is tested here:
what really is in `sys.modules`, sub-packages of other distributions, and whether its own lists are complete."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.lanes import wants_cores

ROOT = Path(__file__).parents[1]
TENSOR_LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "gguf", "accelerate")
TENSOR_PART = (
    "specdec.noise",
    "specdec.margins",
    "specdec.sampling",
    "specdec.support",
    "specdec.law",
    "specdec.accept",
    "specdec.ratio",
    "specdec.engine",
    "specdec.drafters",
)
CORE = ("specdec", "draft_worker", "target_worker", "scheduler")


def modules(package: str) -> list[str]:
    """Every module below a folder of the checkout."""
    names = []
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def torch_free_part() -> list[str]:
    return [name for name in modules("specdec") if not name.startswith(TENSOR_PART)]


def loaded_by(*names: str) -> set[str]:
    """Top-level modules that importing `names` leaves in a fresh interpreter."""
    code = "import importlib, json, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n" + (
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_scheduler_loads_no_tensor_library() -> None:
    loaded = loaded_by(*modules("scheduler"))

    assert not loaded & set(TENSOR_LIBRARIES)
    assert not loaded & {"grpc", "redis", "google", "services", "outrider", "draft_worker", "target_worker"}


def test_torch_free_part_of_specdec_loads_no_tensor_library() -> None:
    assert not loaded_by(*torch_free_part()) & set(TENSOR_LIBRARIES)


@pytest.mark.parametrize(
    "module",
    ["services.cli.main", "services.scheduler_process", "services.gateway", "services.launcher", "services.settings"],
)
def test_processes_without_a_model_load_no_tensor_library(module: str) -> None:
    assert not loaded_by(module) & set(TENSOR_LIBRARIES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("real_greedy", True),  # asks for the real model
        ("engine_tiled", True),
        ("launcher_up", True),
        ("k8s_processes", True),  # starts them through two other tools
        ("gateway_process", True),
        ("law_draws", False),
        ("rules_greedy", False),  # table models in its own process
        ("wire_codec", False),
    ],
)
def test_what_wants_more_than_a_core_goes_in_turn(name: str, expected: bool) -> None:
    assert wants_cores(ROOT / "tests" / f"test_{name}.py") is expected


def test_sdk_loads_nothing_of_ours() -> None:
    loaded = loaded_by("outrider", "outrider.client", *modules("outrider/v1"))

    assert not loaded & {*CORE, "services", *TENSOR_LIBRARIES, "redis", "pydantic", "typer", "tokenizers"}


def test_importing_the_sdk_alone_loads_no_grpc() -> None:
    assert "grpc" not in loaded_by("outrider")


def test_every_name_of_the_sdk_is_there() -> None:
    import outrider

    assert [name for name in outrider.__all__ if not hasattr(outrider, name)] == []


@pytest.mark.parametrize("package", [*CORE, "outrider"])
def test_only_services_uses_the_telemetry_sdk(package: str) -> None:
    forbidden = ("opentelemetry.sdk", "opentelemetry.exporter")
    guilty = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / package).rglob("*.py")
        for name in imported(file)
        if name.startswith(forbidden)
    ]

    assert guilty == []


def test_contract_of_the_torch_free_part_names_all_of_it() -> None:
    """import-linter takes no "all but": a new module of specdec must be put on one side or the other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (c for c in contracts if "torch-free" in c["name"])

    assert sorted(contract["source_modules"]) == [name for name in torch_free_part() if name != "specdec"]


def declared(*extras: str) -> set[str]:
    """Distributions that `outrider[extras]` asks for itself, normalised."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {normal(re.split(r"[\[<>=!~; ]", line)[0]) for line in wanted}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("packages", "extras"),
    [
        (["outrider"], ["tracing"]),
        (["scheduler"], []),
        (["specdec", "draft_worker", "target_worker"], ["service", "worker"]),
        (["services"], ["service", "scheduler", "worker", "embedded", "ray"]),
    ],
    ids=["sdk", "scheduler", "workers", "services"],
)
def test_every_import_is_a_declared_dependency(packages: list[str], extras: list[str]) -> None:
    """What comes only with another package breaks when that one drops it."""
    providers = importlib.metadata.packages_distributions()
    ours = {*CORE, "services", "outrider"}
    undeclared = {
        f"{file.relative_to(ROOT)}: {name}"
        for package in packages
        for file in (ROOT / package).rglob("*.py")
        for name in imported(file)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names | ours
        and not {normal(d) for d in providers.get(top, [])} & declared(*extras)
    }

    assert sorted(undeclared) == []
