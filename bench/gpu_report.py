"""What the GPU check found: checks and figures as they come, a table of them, and the JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Check:
    """One promise. detail: what was measured."""

    name: str
    passed: bool
    detail: str


@dataclass(slots=True)
class Findings:
    """deadline: of `time.monotonic()`; figures that would begin later are skipped and named, checks never are."""

    deadline: float
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def check(self, name: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(name, passed, detail))
        print(f"{'ok    ' if passed else 'FAILED'} {name}: {detail}", file=sys.stderr, flush=True)

    def figure(self, name: str, value: float) -> None:
        self.figures[name] = value
        print(f"       {name} = {value:,.4g}", file=sys.stderr, flush=True)

    def has_time_for(self, name: str) -> bool:
        if time.monotonic() < self.deadline:
            return True
        self.skipped.append(name)
        return False

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def table(self) -> str:
        rows = [(check.name, "ok" if check.passed else "FAILED", check.detail) for check in self.checks]
        rows += [(name, f"{value:,.4g}", "") for name, value in self.figures.items()]
        rows += [(name, "skipped", "no time was left") for name in self.skipped]
        first, second = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
        return "\n".join(f"{name:<{first}}  {value:>{second}}  {detail}".rstrip() for name, value, detail in rows)

    def write(self, path: Path, about: dict[str, object]) -> None:
        """about: machine, command and options. Raises OSError."""
        checks = [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in self.checks]
        content = {**about, "checks": checks, "figures": self.figures, "skipped": self.skipped}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
