"""Settings of the two worker roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from services.settings.base import ServingSettings, unique_name
from services.settings.kinds import Address, Size

if TYPE_CHECKING:
    from draft_worker.config import DraftConfig
    from target_worker.config import TargetConfig

DEFAULT_MODEL = "smollm2-135m"

Dtype = Literal["auto", "bf16", "fp32"]
DrafterKind = Literal["ngram", "model"]
Quantization = Literal["auto", "none", "int4"]
TargetQuantization = Literal["none", "int8"]


class WorkerSettings(ServingSettings):
    """What both worker roles share."""

    advertise: Address | None = Field(None, description="Address that schedulers are told; none: that of listen.")
    dtype: Dtype = Field("auto", description="auto (bf16 where device or layers have it, else fp32), bf16 or fp32.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of a forward; none: torch's choice.")
    kv_memory: Size | None = Field(None, ge=2**20, description="Memory for KV, e.g. 2GiB; none: 2 GiB on a CPU.")
    max_context: int | None = Field(None, ge=16, description="Longest log in tokens; none: the model's own limit.")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:INDEX.")
    metrics_host: str = Field("127.0.0.1", min_length=1, description="Host or address that metrics are served at.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port that serves metrics to Prometheus; 0: a free one; none: no port."
    )
    cpu_turns: bool | None = Field(
        None,
        description="Take turns on the host's cores with its other workers; none: `outrider up` decides.",
    )


class TargetSettings(WorkerSettings):
    """The process that holds the model which users asked for."""

    section: ClassVar[str] = "target"

    model: str = Field(DEFAULT_MODEL, min_length=1, description="Named source, hub id, or local folder.")
    worker_id: str = Field(
        default_factory=lambda: unique_name("target"), min_length=1, description="Name of this worker; must be unique."
    )
    listen: Address = Field("127.0.0.1:50061", description="Where to serve: HOST:PORT or unix:/path.")
    quantization: TargetQuantization = Field(
        "none",
        description="Weights of the target model: none, or int8 (on a CPU): another model, served as NAME-int8.",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Processes that hold the model together, one GPU each; 1: this one alone."
    )
    token_budget: int = Field(512, ge=1, le=65536, description="Rows of one packed forward at most.")
    prefill_chunk: int = Field(256, ge=1, le=65536, description="Rows of one sequence's prefill per forward.")
    max_sequences: int = Field(256, ge=1, le=65536, description="Sequences open at once.")
    held_blocks: int = Field(8, ge=0, le=1024, description="Blocks held per sequence while ahead of its log.")

    def target_config(self) -> TargetConfig:
        from target_worker.config import TargetConfig

        return TargetConfig(
            worker_id=self.worker_id,
            secret=self.secret_bytes,
            token_budget=self.token_budget,
            prefill_chunk=self.prefill_chunk,
            max_sequences=self.max_sequences,
            held_blocks=self.held_blocks,
        )


class DraftSettings(WorkerSettings):
    """The process that proposes candidates."""

    section: ClassVar[str] = "draft"

    drafter: DrafterKind = Field("ngram", description="ngram (lookup in the log, no model) or model.")
    model: str | None = Field(None, min_length=1, description="Model of the drafter `model`: source, hub id, folder.")
    worker_id: str = Field(
        default_factory=lambda: unique_name("draft"), min_length=1, description="Name of this worker; must be unique."
    )
    listen: Address = Field("127.0.0.1:50062", description="Where to serve: HOST:PORT or unix:/path.")
    quantization: Quantization = Field(
        "auto", description="Weights of the draft model: none, int4, or auto (int4 on a CPU in bf16)."
    )
    ngram_max: int = Field(4, ge=1, le=64, description="Longest tail of the log that ngram looks up, in tokens.")
    ngram_min: int = Field(2, ge=1, le=64, description="Shortest tail of the log that ngram looks up, in tokens.")
    max_batch: int = Field(64, ge=1, le=4096, description="Sequences drafted together.")
    max_draft_length: int = Field(32, ge=1, le=256, description="Longer plans are trimmed to this many candidates.")
    max_width: int = Field(8, ge=1, le=64, description="Wider plans are trimmed to this many siblings.")
    max_window: int = Field(8, ge=1, le=8, description="Blocks of a sequence in flight at most.")
    max_sequences: int = Field(1024, ge=1, le=65536, description="Sequences open at once.")

    def draft_config(self) -> DraftConfig:
        from draft_worker.config import DraftConfig

        return DraftConfig(
            worker_id=self.worker_id,
            secret=self.secret_bytes,
            max_batch=self.max_batch,
            max_draft_length=self.max_draft_length,
            max_width=self.max_width,
            max_window=self.max_window,
            max_sequences=self.max_sequences,
        )
