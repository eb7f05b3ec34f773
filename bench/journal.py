"""What an interrupted run leaves: its raw results, one JSON object a line, so that the next run goes on from there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Journal:
    """Rows by key, each on disk as soon as it is recorded. The first line says which settings they were made with."""

    def __init__(self, path: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        """fresh: what an earlier run left is thrown away; so it is if it had other settings."""
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        self.other_settings = False
        """Whether rows of other settings were thrown away."""
        self._settings = json.loads(json.dumps(settings, default=str))
        if not fresh and path.is_file():
            self._read()
        self._write_all()

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def record(self, key: str, row: Mapping[str, Any]) -> None:
        self.rows[key] = {"key": key, "commit": commit(), **row}
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[key]) + "\n")
            file.flush()

    def commits(self) -> list[str]:
        """Of the code that made the rows; more than one if it changed between interruption and resumption."""
        return list(dict.fromkeys(row["commit"] for row in self.rows.values()))

    def finish(self) -> None:
        """The rows are in the report now."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        lines = self.path.read_text().splitlines()
        found = [_parsed(line) for line in lines]
        if not found or found[0] is None or found[0].get("settings") != self._settings:
            self.other_settings = bool(lines[1:])
            return
        self.rows = {row["key"]: row for row in found[1:] if row is not None}

    def _write_all(self) -> None:
        """Anew, so that a line that was cut off by a kill does not spoil the one behind it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"settings": self._settings}, *self.rows.values()]
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fresh.replace(self.path)


def commit() -> str:
    """Short id of the code's commit, with a + behind it where the tree differs; "unknown" outside of a clone."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row
