"""Settings: one model per role, read from a YAML file, the environment and flags, in this order of rising weight."""

from __future__ import annotations

from services.settings.base import RoleSettings, ServingSettings
from services.settings.loading import Loaded, Origin, SettingsError, load
from services.settings.scheduler import SchedulerSettings
from services.settings.up import UpSettings
from services.settings.workers import DEFAULT_MODEL, DraftSettings, TargetSettings, WorkerSettings

__all__ = [
    "DEFAULT_MODEL",
    "DraftSettings",
    "Loaded",
    "Origin",
    "RoleSettings",
    "SchedulerSettings",
    "ServingSettings",
    "SettingsError",
    "TargetSettings",
    "UpSettings",
    "WorkerSettings",
    "load",
]
