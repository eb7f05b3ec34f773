"""`outrider up`: a whole deployment on this machine."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from services.cli.fetching import fetch_shown
from services.cli.flags import Flags, settings_app
from services.deployment import Api, Ports, RoleOverrides, plan, private_folder, requested_address
from services.launcher import Launcher, Session, free_port
from services.output import Output
from services.settings import SchedulerSettings, TargetSettings, UpSettings, load
from services.settings.loading import Loaded
from services.start_error import StartError

SCHEDULER_FLAGS = (
    "redis_url",
    "accept_rule",
    "policy",
    "draft_length",
    "max_sequences",
    "allow_unauthenticated",
    "tls_cert",
    "tls_key",
    "drain_timeout",
)
WORKER_FLAGS = ("kv_memory", "max_context", "device")
TARGET_FLAGS = ("tensor_parallel",)
HELP = """Start scheduler, target workers and draft workers on this machine, and end them on Ctrl-C.

What has no flag here can be set per role in the settings file: sections scheduler, target and draft."""


def run(config: Path | None, flags: Flags) -> int:
    return start(config, flags)


def start(config: Path | None, flags: Flags, session: Session | None = None) -> int:
    """Runs a deployment until it is interrupted or `session` is over. Raises SettingsError, StartError."""
    up = load(UpSettings, config, {name: value for name, value in flags.items() if name in UpSettings.model_fields})
    roles = RoleOverrides.read(config, _by_role(flags))
    ports = _free_ports(up, roles)
    wanted = plan(up, roles, Path(), ports)
    _refuse_exposed(wanted.scheduler)
    for model in wanted.models:
        fetch_shown(model)
    folder = private_folder()
    output = Output(up.settings.log_dir, as_json=up.settings.log_format == "json")
    try:
        launcher = Launcher(plan(up, roles, folder, ports), output, up.settings.start_timeout)
        return asyncio.run(launcher.run(session))
    except OSError as error:
        raise StartError(f"cannot start: {error}") from error
    finally:
        output.close()
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(up: Loaded[UpSettings], roles: RoleOverrides) -> Ports:
    """Raises StartError."""
    grpc = free_port(*requested_address(up, roles, Api.GRPC), Api.GRPC)
    host, wanted = requested_address(up, roles, Api.HTTP)
    http = free_port(host, wanted, Api.HTTP)
    while wanted == 0 and http == grpc:  # chance: nobody holds the first one yet
        http = free_port(host, wanted, Api.HTTP)
    return Ports(grpc, http)


def _refuse_exposed(scheduler: SchedulerSettings) -> None:
    """Before anything is fetched or loaded. Raises StartError."""
    from services.scheduler_process import refuse_exposed  # imported late: `--help` must answer at once

    refuse_exposed(scheduler)


def _by_role(flags: Flags) -> dict[str, dict[str, Any]]:
    scheduler = {name: value for name, value in flags.items() if name in SCHEDULER_FLAGS}
    workers = {name: value for name, value in flags.items() if name in WORKER_FLAGS}
    target = {name: value for name, value in flags.items() if name in TARGET_FLAGS}
    return {"scheduler": scheduler, "target": {**workers, **target}, "draft": workers}


app = settings_app(
    {UpSettings: None, SchedulerSettings: SCHEDULER_FLAGS, TargetSettings: (*WORKER_FLAGS, *TARGET_FLAGS)},
    HELP,
    run,
)
