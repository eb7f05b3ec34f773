"""What the settings of every role have in common."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.settings.kinds import Address

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]


def unique_name(role: str) -> str:
    """A name for a process that no other one has: role, host, process id, and chance."""
    return f"{role}-{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(2)}"


class RoleSettings(BaseSettings):
    """One role's settings. `services.settings.loading.load` reads them from file, environment and flags; the
    constructor takes values only."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())
    section: ClassVar[str]
    """Name of the role: its section in the file and its infix in the environment."""

    log_level: LogLevel = Field("info", description="Least severe level that is logged: debug, info, warning, error.")
    log_format: LogFormat = Field(
        "auto", description="text, json (one object per line), or auto: text on a terminal and under `outrider up`."
    )
    log_dir: Path | None = Field(None, description="Folder for one bounded log file per role; none: no files.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class ServingSettings(RoleSettings):
    """What every process that serves gRPC needs."""

    secret: SecretStr = Field(
        SecretStr(""), description="Keys the digests of logs; the same for the scheduler and its workers."
    )
    redis_url: str | None = Field(None, description="Redis for leases and records, e.g. redis://host:6379/0.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain to serve TLS with.")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert.")
    tls_ca: Path | None = Field(None, description="PEM roots that certificates of the other side must descend from.")
    allow_unauthenticated: bool = Field(
        False, description="Permit listening beyond loopback without an API key or TLS."
    )
    health_listen: Address | None = Field(
        None,
        description="A second address, for health checks alone and never TLS: for probes that cannot speak it.",
    )
    log_prompts: bool = Field(False, description="Log what users send and get; else nothing of it is logged.")
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/]",
        description="OpenTelemetry collector (OTLP over gRPC), e.g. http://127.0.0.1:4317; none: nothing is sent.",
    )
    metrics_interval: float = Field(
        15.0, ge=0.1, le=3600, description="Seconds between exports of metrics to otlp_endpoint."
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=3600, description="Seconds that running sequences get to end after SIGTERM."
    )

    @property
    def secret_bytes(self) -> bytes:
        return self.secret.get_secret_value().encode()
