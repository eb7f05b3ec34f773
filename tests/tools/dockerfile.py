"""A Dockerfile's steps in a clean folder, where no Docker engine runs: each stage is a folder tree of its own.

Knows FROM, ARG, ENV, WORKDIR, COPY and RUN as our files use them; USER, EXPOSE, ENTRYPOINT and CMD are read and kept.
Paths of the image become paths below the folder of the stage; `python` is the interpreter of the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Stage:
    """steps: instruction and rest of the line, in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str | None:
        return next((rest for word, rest in reversed(self.steps) if word == instruction), None)


def read_dockerfile(path: Path) -> tuple[dict[str, str], dict[str, Stage]]:
    """Arguments in front of the first FROM, and the stages by name. Raises ValueError for what is not known."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.split()
            stage = stages[name] = Stage(name, base)
        elif stage is None:
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif word in {"ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}:
            stage.steps.append((word, " ".join(rest.split())))
        else:
            raise ValueError(f"{path.name}: {word} is not known here")
    return arguments, stages


def chain(stages: Mapping[str, Stage], name: str) -> list[Stage]:
    """A stage and those that it is built on, the first one first."""
    stage = stages[name]
    return [*chain(stages, stage.base), stage] if stage.base in stages else [stage]


def instruction(stages: Mapping[str, Stage], name: str, word: str) -> list[str]:
    """A list such as ENTRYPOINT of a stage, or of one that it is built on."""
    found = next(rest for stage in reversed(chain(stages, name)) if (rest := stage.last(word)))
    return [str(part) for part in json.loads(found)]


class Build:
    """Builds stages below `folder`, each once. arguments: as for --build-arg."""

    def __init__(self, path: Path, folder: Path, arguments: Mapping[str, str] | None = None) -> None:
        _, self._stages = read_dockerfile(path)
        self._folder, self._arguments = folder, dict(arguments or {})
        self._built: dict[str, Path] = {}
        python = folder / "bin"
        python.mkdir(parents=True)
        (python / "python").symlink_to(sys.executable)
        self._path = f"{python}{os.pathsep}{os.environ['PATH']}"

    def build(self, name: str) -> Path:
        """The stage's root folder."""
        if name not in self._built:
            stage = self._stages[name]
            root = self._folder / name
            if stage.base in self._stages:
                shutil.copytree(self.build(stage.base), root, symlinks=True)
            root.mkdir(exist_ok=True)
            self._run_steps(stage, root)
            self._built[name] = root
        return self._built[name]

    def _run_steps(self, stage: Stage, root: Path) -> None:
        variables: dict[str, str] = {}
        folder = "/"
        for earlier in chain(self._stages, stage.name):
            for word, rest in earlier.steps:
                if word == "ARG":
                    key, _, default = rest.partition("=")
                    if value := self._arguments.get(key, default):
                        variables[key] = value
                elif word == "ENV":
                    variables |= dict(pair.split("=", 1) for pair in rest.split())
                elif word == "WORKDIR":
                    folder = rest
                    (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
                elif earlier is stage and word == "COPY":
                    self._copy(rest.split(), root, root / folder.lstrip("/"))
                elif earlier is stage and word == "RUN" and "useradd" not in rest:
                    self._run(rest, root, root / folder.lstrip("/"), variables)

    def _copy(self, words: Sequence[str], root: Path, folder: Path) -> None:
        if words[0].startswith("--from="):
            source = self.build(words[0].removeprefix("--from=")) / words[1].lstrip("/")
            shutil.copytree(source, root / words[2].lstrip("/"), symlinks=True)
            return
        for name in words[:-1]:
            for file in context() if name == "." else [Path(name)]:
                target = folder / words[-1] / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, target)

    def _run(self, command: str, root: Path, folder: Path, variables: Mapping[str, str]) -> None:
        """Raises RuntimeError with what the command wrote."""

        def here(text: str) -> str:
            return re.sub(r"(?<![\w./])/(opt|src|wheels)\b", rf"{root}/\1", text)

        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        kept = {name: value for name, value in os.environ.items() if name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")}
        ours = {name: here(value) for name, value in variables.items()}
        done = subprocess.run(
            ["sh", "-ec", here(command)],
            cwd=folder,
            env={**environment, **kept, **ours, "PATH": self._path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command}\n{done.stdout}")


def context() -> list[Path]:
    """Files of the checkout that .dockerignore lets through."""
    rules = [rule for rule in (ROOT / ".dockerignore").read_text().split("\n") if rule and not rule.startswith("#")]
    refused = [rule.removeprefix("**/").rstrip("/") for rule in rules if rule.startswith("**/")]
    found: list[Path] = []
    for name in (rule[1:].rstrip("/") for rule in rules if rule.startswith("!")):
        path = ROOT / name
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        found += [file.relative_to(ROOT) for file in files]
    return [file for file in found if not any(fnmatch(part, rule) for part in file.parts for rule in refused)]
