"""A worker as a deployment wants it, before any pool has placed it."""

from __future__ import annotations

from dataclasses import dataclass

from services.settings import DraftSettings, TargetSettings


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """command: what runs in place of `outrider target` or `outrider draft`, with {config} for its settings file and
    {listen} for its address."""

    settings: TargetSettings | DraftSettings
    command: str | None = None

    @property
    def name(self) -> str:
        return self.settings.worker_id
