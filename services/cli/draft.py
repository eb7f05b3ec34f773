"""`outrider draft`: one draft worker in this process."""

from __future__ import annotations

from pathlib import Path

from services.cli.flags import Flags, settings_app
from services.settings import DraftSettings, load


def run(config: Path | None, flags: Flags) -> int:
    settings = load(DraftSettings, config, flags).settings
    from services.draft_process import run_draft

    return run_draft(settings)


app = settings_app({DraftSettings: None}, "Run one draft worker: it proposes candidates.", run)
