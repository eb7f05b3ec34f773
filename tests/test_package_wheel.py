"""The wheel holds what the checkout holds, and all of it can be imported without the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("outrider", "specdec", "draft_worker", "target_worker", "scheduler", "services")
BUILD_FILES = ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY.md")

IMPORT_ALL = """
import importlib, pathlib, sys
installed, site, *packages = sys.argv[1:]
sys.path[:0] = [installed]
sys.path.append(site)
failed = []
for package in packages:
    for file in sorted(pathlib.Path(installed, package).rglob("*.py")):
        parts = file.relative_to(installed).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[-1] == "__main__":
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if pathlib.Path(module.__file__) != file:
            failed.append(f"{name} came from {module.__file__}")
        print(name)
sys.exit("\\n".join(failed) or 0)
"""


def package_files(root: Path) -> set[str]:
    return {
        file.relative_to(root).as_posix()
        for package in PACKAGES
        for file in (root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def module_names(files: set[str]) -> set[str]:
    names = (file.removesuffix(".py").removesuffix("/__init__") for file in files if file.endswith(".py"))
    return {name.replace("/", ".") for name in names if not name.endswith("/__main__")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a `build` folder left in the checkout would smuggle deleted modules in."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip(source, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", "dist", ".")
    (built,) = (source / "dist").glob("*.whl")
    return built


def pip(cwd: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments, "--no-index"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_wheel_holds_every_file_of_every_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {name for name in names if ".dist-info/" not in name} == package_files(ROOT)
    licenses = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    assert licenses == {"LICENSE", "THIRD_PARTY.md"}


def test_every_top_level_package_tells_that_it_is_typed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_every_module_of_the_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """-S leaves out .pth files, through which an editable install would answer in the wheel's place."""
    installed = tmp_path / "installed"
    pip(tmp_path, "install", "--no-deps", "--target", str(installed), str(wheel))

    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(installed), sysconfig.get_path("purelib"), *PACKAGES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == module_names(package_files(ROOT))
