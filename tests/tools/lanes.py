"""Two lanes for `pytest -n 2`: files that want more than one core go one after the other, the rest beside them.

A real model computes on every core, and a worker process is one more beside the test's own: two files of that kind at
once starve each other. A test of table models in its own process keeps one core busy, whatever it imports.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler.loadscope import LoadScopeScheduling

IN_TURN = "in turn"
_TOOLS = Path(__file__).parent
_WANT_CORES = frozenset(
    {"browser", "engine", "manifest_pod", "monitored", "real_system", "real_target", "socket_deployment", "up"}
)
"""Tools that compute on every core or start processes that do."""
_TOOL = re.compile(r"^from tools\.(\w+) import", re.MULTILINE)
_REAL_MODEL = re.compile(r"\bsmollm2: Path\b")


@cache
def wants_cores(file: Path) -> bool:
    """Whether a file of tests, or a tool, uses a real model or one of those tools, through others too."""
    text = file.read_text(encoding="utf-8")
    if _REAL_MODEL.search(text):
        return True
    return any(name in _WANT_CORES or wants_cores(_TOOLS / f"{name}.py") for name in _TOOL.findall(text))


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """A scope, which one process runs in order, is all that goes in turn, or one file of the rest."""

    def _split_scope(self, nodeid: str) -> str:
        name = nodeid.partition("::")[0]
        return IN_TURN if wants_cores(self.config.rootpath / name) else name
