"""Settings of `outrider up`. What it does not name, each role takes from its own section."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from services.settings.base import RoleSettings
from services.settings.scheduler import DEFAULT_HTTP_PORT, DEFAULT_PORT
from services.settings.workers import DEFAULT_MODEL, DrafterKind, Dtype, Quantization, TargetQuantization

PoolKind = Literal["local", "ray"]


class UpSettings(RoleSettings):
    """A whole deployment on this machine."""

    section: ClassVar[str] = "up"

    model: str = Field(DEFAULT_MODEL, min_length=1, description="Target model: named source, hub id, or local folder.")
    drafter: DrafterKind | None = Field(
        None, description="ngram (lookup in the log) or model; none: model if draft_model is given, else ngram."
    )
    draft_model: str | None = Field(None, min_length=1, description="Draft model: named source, hub id, or folder.")
    targets: int = Field(1, ge=1, le=64, description="Target workers to start.")
    drafts: int = Field(1, ge=0, le=64, description="Draft workers to start; 0: plain decoding only.")
    dtype: Dtype | None = Field(None, description="dtype of both roles; none: that of each role's section.")
    draft_quantization: Quantization | None = Field(
        None, description="Weights of the draft model: auto, none or int4; none given: that of the draft section."
    )
    target_quantization: TargetQuantization | None = Field(
        None, description="Weights of the target model: none or int8; none given: that of the target section."
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of each worker; none: all cores, taking turns where needed."
    )
    grpc_host: str = Field("127.0.0.1", min_length=1, description="Host or address of the public gRPC API.")
    grpc_port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="Port of the public gRPC API; 0: a free one.")
    http_host: str = Field("127.0.0.1", min_length=1, description="Host or address of the OpenAI-compatible HTTP API.")
    http_port: int = Field(
        DEFAULT_HTTP_PORT, ge=0, le=65535, description="Port of the OpenAI-compatible HTTP API; 0: a free one."
    )
    target_command: str | None = Field(
        None,
        min_length=1,
        description="Command to run as target worker; {config} stands for its settings file, {listen} for its address.",
    )
    draft_command: str | None = Field(None, min_length=1, description="The same for draft workers.")
    pool: PoolKind = Field("local", description="Where workers run: local (processes here) or ray (actors of Ray).")
    ray_address: str | None = Field(
        None, min_length=1, description="Ray cluster to join, HOST:PORT or auto; none: one of its own on this machine."
    )
    target_gpus: float | None = Field(
        None, ge=0, le=64, description="GPUs that Ray reserves for a target worker; none: 1 with device cuda, else 0."
    )
    draft_gpus: float | None = Field(None, ge=0, le=64, description="The same for a draft worker; may be a fraction.")
    max_targets: int | None = Field(
        None, ge=1, le=64, description="Target workers at most, as demand goes; none: always as many as targets."
    )
    max_drafts: int | None = Field(None, ge=1, le=64, description="The same for draft workers.")
    sequences_per_target: int = Field(
        16, ge=1, le=65536, description="Sequences that a target worker serves well at once; more ask for another one."
    )
    sequences_per_draft: int = Field(32, ge=1, le=65536, description="The same for a draft worker.")
    start_timeout: float = Field(600.0, gt=0, le=86400, description="Seconds that the start may take.")

    @property
    def by_lease(self) -> bool:
        """Whether workers come and go, so that the scheduler looks for their leases."""
        return self.pool == "ray" or self.max_targets is not None or self.max_drafts is not None

    @property
    def drafter_kind(self) -> DrafterKind:
        return self.drafter or ("model" if self.draft_model else "ngram")
