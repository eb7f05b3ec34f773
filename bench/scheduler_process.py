"""The scheduler process as `outrider scheduler` runs it, started by a benchmark: says when it is ready, ends with its
starter, and on demand writes down how long it holds each round: `python -m bench.scheduler_process --settings FILE`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.journal import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from scheduler.config import SchedulerConfig
from services import event_loop
from services.scheduler_process import serve_scheduler
from services.settings import SchedulerSettings, load
from tools.process import end_with_starter, say_ready

PATIENCE = 5.0
"""Seconds that a draft is waited for, so that a busy machine changes no count."""


class PatientSettings(SchedulerSettings):
    def scheduler_config(self) -> SchedulerConfig:
        return replace(super().scheduler_config(), min_draft_patience=PATIENCE, draft_timeout=PATIENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--times", type=Path, help="file for the milliseconds of each round")
    options = parser.parse_args()
    end_with_starter()
    if options.times:
        from bench import round_times

        round_times.install(options.times)
    event_loop.run(serve_scheduler(load(PatientSettings, options.settings).settings, on_ready=say_ready))


if __name__ == "__main__":
    main()
