"""`outrider target`: one target worker in this process."""

from __future__ import annotations

import sys
from pathlib import Path

from services.cli.flags import Flags, settings_app
from services.settings import TargetSettings, load


def run(config: Path | None, flags: Flags) -> int:
    settings = load(TargetSettings, config, flags).settings
    from services.pools.ranks import start_ranks
    from services.target_process import run_target

    start_ranks(settings.tensor_parallel, settings.device, (sys.executable, "-m", "services.cli.main", *sys.argv[1:]))
    return run_target(settings)


app = settings_app({TargetSettings: None}, "Run one target worker: the model that users ask for.", run)
