"""Settings of the scheduler process: the gateway, the scheduler, and the embedded Redis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from services.settings.base import ServingSettings, unique_name
from services.settings.kinds import AddressList, Size, TextList

if TYPE_CHECKING:
    from scheduler.audit import AuditConfig
    from scheduler.config import SchedulerConfig

DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 8000

PolicyName = Literal["goodput", "threshold", "fixed"]
AcceptRuleName = Literal["invariant", "rejection", "block"]


class SchedulerSettings(ServingSettings):
    """The process that users talk to: it owns the logs and coordinates the workers."""

    section: ClassVar[str] = "scheduler"

    scheduler_id: str = Field(
        default_factory=lambda: unique_name("scheduler"), min_length=1, description="Owner name in epochs; unique."
    )
    grpc_host: str = Field("127.0.0.1", min_length=1, description="Host or address of the public gRPC API.")
    grpc_port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="Port of the public gRPC API; 0: a free one.")
    http_host: str = Field("127.0.0.1", min_length=1, description="Host or address of the OpenAI-compatible HTTP API.")
    http_port: int = Field(
        DEFAULT_HTTP_PORT, ge=0, le=65535, description="Port of the OpenAI-compatible HTTP API; 0: a free one."
    )
    cors_origins: TextList = Field(
        (), description="Origins whose web pages may call the HTTP API, or *; none: no web page may."
    )
    max_request_bytes: Size = Field(
        32 * 2**20, ge=1024, le=2**30, description="Longest body that the HTTP API reads, e.g. 32MiB."
    )
    redis_socket: Path | None = Field(
        None, description="Socket of the embedded redis-server, used without redis_url; none: a private one."
    )
    targets: AddressList = Field((), description="Addresses of target workers that need no discovery.")
    drafters: AddressList = Field((), description="Addresses of draft workers that need no discovery.")
    tls_worker_name: str | None = Field(
        None,
        min_length=1,
        description="Name that certificates of workers must carry; none: the host of their address.",
    )
    api_keys: TextList = Field(
        (), repr=False, description="Keys of which a client must send one; none: any key does, or none."
    )
    accept_rule: AcceptRuleName = Field(
        "invariant", description="Accept rule of requests that name none: invariant, rejection or block."
    )
    policy: PolicyName = Field("goodput", description="How the draft length is chosen: goodput, threshold or fixed.")
    draft_length: int = Field(5, ge=0, le=256, description="Candidates on the longest path at the start; 0: plain.")
    max_draft_length: int = Field(16, ge=1, le=256, description="Candidates on the longest path at most.")
    width: int = Field(1, ge=1, le=64, description="Siblings of a candidate tree at most; 1 is a chain.")
    window: int = Field(
        1,
        ge=1,
        le=8,
        description="Blocks of a sequence in flight, unless `goodput` chooses; 1: stop and wait.",
    )
    max_window: int = Field(8, ge=1, le=8, description="Blocks of a sequence in flight that `goodput` may choose.")
    fan_out: int = Field(
        0, ge=0, le=7, description="With a window above 1: more blocks for each in it, for the next likeliest tokens."
    )
    off_below: float = Field(0.2, ge=0, le=1, description="Acceptance rate below which `threshold` stops drafting.")
    acceptance_window: int = Field(8, ge=1, le=1024, description="Recent rounds that `threshold` looks at.")
    probe_after_tokens: int = Field(32, ge=1, le=65536, description="Plain tokens before drafting is tried again.")
    round_timeout: float = Field(10.0, gt=0, le=3600, description="Seconds without progress that lose a target.")
    draft_timeout: float = Field(2.0, gt=0, le=3600, description="Seconds that a draft is waited for.")
    grant_tokens: int = Field(64, ge=1, le=65536, description="Tokens that a target may decode unasked.")
    admission_timeout: float = Field(30.0, ge=0, le=3600, description="Seconds that a request may wait for room.")
    max_sequences: int = Field(256, ge=1, le=65536, description="Sequences served at once.")

    trace_sample_ratio: float = Field(
        0.05, ge=0, le=1, description="Share of requests whose trace is sent to otlp_endpoint, where no caller decided."
    )
    trace_slow_seconds: float = Field(
        30.0,
        gt=0,
        le=86400,
        description="Seconds after which a request is traced whatever the share; failed ones are.",
    )

    audit_share: float = Field(
        0.01, ge=0, le=1, description="Share of finished answers that is decoded again plainly when idle, to compare."
    )
    audit_noise: float | None = Field(
        None,
        ge=0,
        le=100,
        description="By how much the gap of two logits may move with the batch; none: what targets measured.",
    )
    audit_dir: Path | None = Field(
        None, description="Folder for what the audit found, prompts included, to replay; none: not kept."
    )
    audit_log_content: bool = Field(False, description="Also log prompt and answer of what the audit found.")

    def audit_config(self) -> AuditConfig:
        from scheduler.audit import AuditConfig

        return AuditConfig(share=self.audit_share, noise=self.audit_noise, log_content=self.audit_log_content)

    def scheduler_config(self) -> SchedulerConfig:
        from scheduler.config import Policy, SchedulerConfig

        return SchedulerConfig(
            scheduler_id=self.scheduler_id,
            secret=self.secret_bytes,
            policy=Policy(self.policy),
            draft_length=self.draft_length,
            max_draft_length=self.max_draft_length,
            width=self.width,
            window=self.window,
            max_window=self.max_window,
            fan_out=self.fan_out,
            off_below=self.off_below,
            acceptance_window=self.acceptance_window,
            probe_after_tokens=self.probe_after_tokens,
            round_timeout=self.round_timeout,
            draft_timeout=self.draft_timeout,
            grant_tokens=self.grant_tokens,
            admission_timeout=self.admission_timeout,
            max_sequences=self.max_sequences,
        )
