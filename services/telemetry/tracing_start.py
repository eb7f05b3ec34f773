"""From settings to what a traced process of ours needs; nothing, and no OpenTelemetry, without `otlp_endpoint`."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.interceptors import TracingInterceptor
from services.telemetry.tracing_calls import Calls
from services.telemetry.tracing_requests import RequestTraces

if TYPE_CHECKING:
    from services.settings import DraftSettings, SchedulerSettings, TargetSettings
    from services.telemetry.tracing import Tracing, TracingConfig


@dataclass(frozen=True, slots=True)
class SchedulerTracing:
    """reader: of the scheduler's journal. calls: those of both APIs; the interceptor begins those of gRPC."""

    tracing: Tracing
    calls: Calls
    reader: RequestTraces
    interceptor: TracingInterceptor

    @classmethod
    def of(cls, config: TracingConfig) -> SchedulerTracing:
        from services.telemetry.tracing import Tracing

        tracing = Tracing(config)
        calls = Calls(tracing, config.sample_ratio, config.slow_seconds)
        return cls(tracing, calls, RequestTraces(tracing, config.slow_seconds, calls.of), TracingInterceptor(calls))

    async def close(self) -> None:
        self.reader.flush()
        await asyncio.to_thread(self.tracing.close)


@dataclass(frozen=True, slots=True)
class WorkerTracing:
    """interceptor: makes each stream of a scheduler one span, which tells how it ended."""

    tracing: Tracing
    interceptor: TracingInterceptor

    @classmethod
    def of(cls, config: TracingConfig) -> WorkerTracing:
        from services.telemetry.tracing import Tracing

        tracing = Tracing(config)
        return cls(tracing, TracingInterceptor(Calls(tracing, sample_ratio=1.0, slow_seconds=math.inf)))

    async def close(self) -> None:
        await asyncio.to_thread(self.tracing.close)


def trace_scheduler(settings: SchedulerSettings) -> SchedulerTracing | None:
    if settings.otlp_endpoint is None:
        return None
    from services.telemetry.tracing import TracingConfig

    config = TracingConfig(
        settings.otlp_endpoint,
        "scheduler",
        settings.scheduler_id,
        settings.trace_sample_ratio,
        settings.trace_slow_seconds,
    )
    return SchedulerTracing.of(config)


def trace_worker(settings: TargetSettings | DraftSettings) -> WorkerTracing | None:
    if settings.otlp_endpoint is None:
        return None
    from services.telemetry.tracing import TracingConfig

    return WorkerTracing.of(TracingConfig(settings.otlp_endpoint, settings.section, settings.worker_id))
