"""What `outrider up` starts: from its settings to one command, settings file and environment per process."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr

from services.child import ChildSpec
from services.logs import LAUNCHED_VARIABLE
from services.pools.placement import RayOptions, Reservation
from services.pools.scaling import Bounds
from services.pools.worker import WorkerSpec
from services.settings import DraftSettings, SchedulerSettings, ServingSettings, TargetSettings, UpSettings, load
from services.settings.environment import ENV_PREFIX
from services.settings.kinds import MAX_SOCKET_PATH
from services.settings.loading import Loaded
from services.start_error import ExitCode, StartError
from services.torch_threads import wait_briefly

SCHEDULER = "scheduler"
_LONGEST_SOCKET = "target-64.sock"
_KEPT_VARIABLES = ("OUTRIDER_HOME",)
_OF_UP = frozenset(UpSettings.model_fields) | {"drafters", "listen", "advertise", "worker_id", "scheduler_id"}
"""Without the name of a role, these variables speak of the deployment, not of one worker."""


@dataclass(frozen=True, slots=True)
class RoleOverrides:
    """What each role's own section of the file and of the environment says."""

    scheduler: Loaded[SchedulerSettings]
    target: Loaded[TargetSettings]
    draft: Loaded[DraftSettings]

    @classmethod
    def read(cls, path: Path | None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> RoleOverrides:
        """flags: by role, then by field. Raises SettingsError."""
        given = flags or {}
        return cls(
            load(SchedulerSettings, path, given.get("scheduler"), _OF_UP),
            load(TargetSettings, path, given.get("target"), _OF_UP),
            load(DraftSettings, path, given.get("draft"), _OF_UP),
        )


class Api(Enum):
    """The two public APIs, as settings and flags name them."""

    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, slots=True)
class Ports:
    """Of the public APIs; free, never 0."""

    grpc: int
    http: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """folder: private; holds settings files and sockets. target_model, draft_model: as named by the user."""

    folder: Path
    scheduler: SchedulerSettings
    targets: tuple[TargetSettings, ...]
    drafts: tuple[DraftSettings, ...]
    target_command: str | None = None
    draft_command: str | None = None
    ray: RayOptions | None = None
    by_lease: bool = False
    """Workers come and go, and the scheduler finds them by their leases."""
    target_bounds: Bounds | None = None
    draft_bounds: Bounds | None = None
    """None: as many as there are."""

    @property
    def address(self) -> str:
        return f"{self.scheduler.grpc_host}:{self.scheduler.grpc_port}"

    @property
    def base_url(self) -> str:
        """Of the HTTP API, as OpenAI clients want it."""
        scheme = "https" if self.scheduler.tls_cert else "http"
        host = self.scheduler.http_host.strip("[]")
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.scheduler.http_port}/v1"

    @property
    def models(self) -> tuple[str, ...]:
        """Models that must be on disk before the workers start."""
        names = [] if self.target_command else [target.model for target in self.targets]
        if not self.draft_command:
            names += [draft.model for draft in self.drafts if draft.model is not None and draft.drafter == "model"]
        return tuple(dict.fromkeys(names))

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        targets = [WorkerSpec(target, self.target_command) for target in self.targets]
        return (*targets, *(WorkerSpec(draft, self.draft_command) for draft in self.drafts))


def child_spec(folder: Path, name: str, settings: ServingSettings, command: str | None = None) -> ChildSpec:
    """Writes the settings into `folder` and says how to start the process that reads them."""
    config = folder / f"{name}.yaml"
    write_settings(config, settings)
    listen = getattr(settings, "listen", "")
    if command is None:
        words = [sys.executable, "-m", "services.cli.main", settings.section, "--config", str(config)]
    else:
        words = [word.replace("{config}", str(config)).replace("{listen}", listen) for word in shlex.split(command)]
    return ChildSpec(name, tuple(words), child_environment(settings))


def private_folder() -> Path:
    """A new folder of mode 700 in which socket paths are short enough. Raises StartError."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        try:
            folder = Path(tempfile.mkdtemp(prefix="outrider-", dir=parent))
        except OSError as error:
            raise StartError(f"cannot make a folder in {parent} ({error.strerror}): set TMPDIR") from error
        if len(os.fsencode(folder / _LONGEST_SOCKET)) < MAX_SOCKET_PATH:
            return folder
        folder.rmdir()
    raise StartError(f"the temporary folder {tempfile.gettempdir()} is too long for sockets: set TMPDIR")


def plan(up: Loaded[UpSettings], roles: RoleOverrides, folder: Path, ports: Ports) -> Deployment:
    """Settings of every process. Raises StartError if they contradict each other."""
    shared = _shared(roles, folder)
    targets = _targets(up, roles, folder, shared)
    drafts = _drafts(up, roles, folder, shared)
    scheduler = roles.scheduler.settings
    return Deployment(
        folder=folder,
        scheduler=scheduler.model_copy(
            update={
                **shared,
                "log_level": up.settings.log_level,
                "log_format": up.settings.log_format,
                "redis_url": roles.scheduler.settings.redis_url,
                "redis_socket": folder / "redis.sock",
                "grpc_host": requested_address(up, roles, Api.GRPC)[0],
                "grpc_port": ports.grpc,
                "http_host": requested_address(up, roles, Api.HTTP)[0],
                "http_port": ports.http,
                **_known_workers(up.settings, scheduler, targets, drafts),
            }
        ),
        targets=targets,
        drafts=drafts,
        target_command=up.settings.target_command,
        draft_command=up.settings.draft_command,
        ray=_ray_options(up.settings, roles) if up.settings.pool == "ray" else None,
        by_lease=up.settings.by_lease,
        target_bounds=_bounds(len(targets), up.settings.max_targets, up.settings.sequences_per_target),
        draft_bounds=_bounds(len(drafts), up.settings.max_drafts, up.settings.sequences_per_draft),
    )


def _known_workers(
    up: UpSettings,
    scheduler: SchedulerSettings,
    targets: Sequence[TargetSettings],
    drafts: Sequence[DraftSettings],
) -> dict[str, Any]:
    """Those that stay where they are; the others come and go, and the scheduler finds their leases."""
    if up.by_lease:
        return {}
    return {
        "targets": (*(worker.listen for worker in targets), *scheduler.targets),
        "drafters": (*(worker.listen for worker in drafts), *scheduler.drafters),
    }


def _bounds(fewest: int, most: int | None, sequences: int) -> Bounds | None:
    """None where nothing scales: nobody said how far, or there is none to make more of."""
    return Bounds(fewest, max(fewest, most), sequences) if most is not None and fewest else None


def _ray_options(up: UpSettings, roles: RoleOverrides) -> RayOptions:
    """Raises StartError if workers on other machines could not be found."""
    if up.ray_address is not None and roles.scheduler.settings.redis_url is None:
        raise StartError(
            "pool ray with ray_address needs a Redis that every node reaches: name it with --redis-url",
            ExitCode.WRONG_USE,
        )
    target, draft = roles.target.settings, roles.draft.settings
    return RayOptions(
        address=up.ray_address,
        target=Reservation.of(target, up.target_gpus, up.ray_address is not None),
        draft=Reservation.of(draft, up.draft_gpus, up.ray_address is not None),
    )


def requested_address(up: Loaded[UpSettings], roles: RoleOverrides, api: Api) -> tuple[str, int]:
    """Host and port of a public API as configured; port 0: any free one."""

    def setting(field: str) -> Any:
        loaded = roles.scheduler if not up.given(field) and roles.scheduler.given(field) else up
        return getattr(loaded.settings, field)

    return setting(f"{api.value}_host"), setting(f"{api.value}_port")


def write_settings(path: Path, settings: ServingSettings) -> None:
    """A settings file that its owner alone can read: it may hold the secret."""
    values: dict[str, Any] = {}
    for field in type(settings).model_fields:
        value = getattr(settings, field)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        elif isinstance(value, Path):
            value = str(value)
        values[field] = list(value) if isinstance(value, tuple) else value
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        yaml.safe_dump({settings.section: values}, file)


def child_environment(settings: ServingSettings, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without settings (those are in the file), with what must be set before torch and grpc are imported."""
    ours = os.environ if inherited is None else inherited
    environment = {
        name: value for name, value in ours.items() if not name.startswith(ENV_PREFIX) or name in _KEPT_VARIABLES
    }
    environment |= {LAUNCHED_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}
    wait_briefly(environment)
    environment.setdefault("GRPC_VERBOSITY", "NONE")
    threads = getattr(settings, "threads", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def _shared(roles: RoleOverrides, folder: Path) -> dict[str, Any]:
    """One secret, and one Redis, for all of them."""
    scheduler = roles.scheduler.settings
    return {
        "secret": scheduler.secret if scheduler.secret_bytes else SecretStr(secrets.token_hex(32)),
        "redis_url": scheduler.redis_url or f"unix://{folder / 'redis.sock'}",
        "log_dir": None,
    }


def _targets(
    up: Loaded[UpSettings], roles: RoleOverrides, folder: Path, shared: Mapping[str, Any]
) -> tuple[TargetSettings, ...]:
    own = roles.target.settings
    model = own.model if roles.target.given("model") and not up.given("model") else up.settings.model
    update = {**shared, **_worker_update(up, roles.target), "model": model}
    if up.settings.target_quantization is not None:
        update["quantization"] = up.settings.target_quantization
    return tuple(own.model_copy(update={**update, **_place(folder, "target", i)}) for i in range(up.settings.targets))


def _drafts(
    up: Loaded[UpSettings], roles: RoleOverrides, folder: Path, shared: Mapping[str, Any]
) -> tuple[DraftSettings, ...]:
    own = roles.draft.settings
    model = up.settings.draft_model or own.model
    kind = up.settings.drafter_kind
    if up.settings.drafter is None and not up.settings.draft_model and roles.draft.given("drafter"):
        kind = own.drafter
    if kind == "model" and model is None and not up.settings.draft_command:
        raise StartError("drafter `model` needs a model: name it with --draft-model", ExitCode.WRONG_USE)
    update = {**shared, **_worker_update(up, roles.draft), "drafter": kind, "model": model if kind == "model" else None}
    if up.settings.draft_quantization is not None:
        update["quantization"] = up.settings.draft_quantization
    return tuple(own.model_copy(update={**update, **_place(folder, "draft", i)}) for i in range(up.settings.drafts))


def another(worker: WorkerSpec, number: int) -> WorkerSpec:
    """As `worker`, under another name and at another address."""
    settings = worker.settings
    folder = Path(settings.listen.removeprefix("unix:")).parent
    place = _place(folder, settings.section, number - 1)
    return WorkerSpec(settings.model_copy(update=place), worker.command)


def _place(folder: Path, role: str, index: int) -> dict[str, Any]:
    name = f"{role}-{index + 1}"
    return {"worker_id": name, "listen": f"unix:{folder / name}.sock", "advertise": None}


def _worker_update(up: Loaded[UpSettings], role: Loaded[TargetSettings] | Loaded[DraftSettings]) -> dict[str, Any]:
    """dtype, threads and turns of one role.

    Measured: several models on shared cores get most done one forward at a time on all cores, but when their threads
    fit on the cores side by side they need no turns.
    """
    settings = up.settings
    models = settings.targets + (settings.drafts if settings.drafter_kind == "model" else 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = settings.threads or role.settings.threads or cores
    update: dict[str, Any] = {
        "threads": threads,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    if role.settings.cpu_turns is None:
        update["cpu_turns"] = models > 1 and models * threads > cores and role.settings.device == "cpu"
    if settings.dtype is not None:
        update["dtype"] = settings.dtype
    return update
