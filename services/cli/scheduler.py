"""`outrider scheduler`: gateway, scheduler and embedded Redis in this process."""

from __future__ import annotations

from pathlib import Path

from services.cli.flags import Flags, settings_app
from services.settings import SchedulerSettings, load


def run(config: Path | None, flags: Flags) -> int:
    settings = load(SchedulerSettings, config, flags).settings
    from services.scheduler_process import run_scheduler

    return run_scheduler(settings)


app = settings_app(
    {SchedulerSettings: None}, "Run the scheduler and the gateway; workers join by address or Redis.", run
)
