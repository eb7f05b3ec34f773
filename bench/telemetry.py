"""Throughput and held rounds of a scheduler process that sends traces and metrics, against one that sends none.

Two scheduler processes in front of the same table models, an OpenTelemetry collector in this process, 32 sequences,
interleaved pairs. A forward takes 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.plots import Bars
from bench.ratios import Goal, ratio
from bench.session import Result, Session

SHARE_GOAL = Goal(0.98)
HELD_GOAL = Goal(0.1, at_most=True, unit="ms")
DRAFT_LENGTH = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=20, help="pairs of runs")
    parser.add_argument("--tokens", type=int, default=100, help="tokens per answer")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--sample-ratio", type=float, default=0.05, help="share of requests that are traced")


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    shares = ratio([row["on"]["rate"] / row["off"]["rate"] for row in rows], SHARE_GOAL)
    ratios = {
        "telemetry.on_vs_off": shares,
        "telemetry.held_ms_more": ratio([row["on"]["held_ms"] - row["off"]["held_ms"] for row in rows], HELD_GOAL),
    }
    chart = Bars(
        "telemetry",
        f"Telemetry on and off, {options.sequences} sequences",
        "tokens per second",
        {name: [row[name]["rate"] for row in rows] for name in ("off", "on")},
    )
    spans = sum(row["spans"] for row in rows)
    notes = (
        f"{len(rows)} pairs, {options.sequences} sequences of {options.tokens} tokens; {options.sample_ratio:.0%} of "
        f"the requests traced, {spans} spans arrived. The lower end of the interval should be at least 0.96: "
        f"{'met' if shares.low >= 0.96 else 'missed'}. {session.stopped_early}"
    )
    return Result("Telemetry on and off", ratios, notes.rstrip(), (chart,))


@dataclass(slots=True)
class _Collector:
    """What arrived: spans, and exports of metrics."""

    endpoint: str = ""
    spans: int = 0
    metric_exports: int = 0


@asynccontextmanager
async def _collector() -> AsyncIterator[_Collector]:
    """Takes traces and metrics as an OpenTelemetry collector does, and counts them."""
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    found = _Collector()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        async def Export(self, request: Any, context: Any) -> Any:
            found.spans += sum(len(scope.spans) for part in request.resource_spans for scope in part.scope_spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        async def Export(self, request: Any, context: Any) -> Any:
            found.metric_exports += 1
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_traces: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_metrics: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_traces(Traces(), server)
    add_metrics(Metrics(), server)
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield found
    finally:
        await server.stop(0)


async def _measure(options: argparse.Namespace, session: Session) -> None:
    from bench.table_system import TableSystem

    async with _collector() as collector:
        off = {"policy": "fixed", "draft_length": DRAFT_LENGTH}
        on = off | {"otlp_endpoint": collector.endpoint, "trace_sample_ratio": options.sample_ratio}
        async with TableSystem(
            ("bench.timed_workers --role target --seconds 0.02",),
            ("bench.timed_workers --role draft --agreement 0.9 --seconds 0.005",),
            {"off": off, "on": on},
            watched=("off", "on"),
        ) as system:
            for name in system.schedulers:
                await _one(system, name, options, -1)
            for key in session.todo([f"pair {i}" for i in range(options.prompts)]):
                number = int(key.split()[1])
                order = ["off", "on"] if number % 2 else ["on", "off"]
                spans = collector.spans
                row = {name: await _one(system, name, options, number) for name in order}
                session.record(key, {**row, "spans": collector.spans - spans})


async def _one(system: Any, name: str, options: argparse.Namespace, number: int) -> dict[str, float]:
    scheduler = system.schedulers[name]
    seen = len(scheduler.round_times())
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            scheduler.client.complete(
                token_ids=(1, 2 + number + 1, 3 + i), max_tokens=options.tokens, temperature=0.0, ignore_eos=True
            )
            for i in range(options.sequences)
        )
    )
    seconds = time.perf_counter() - started
    held = [to_verify + to_event for to_verify, to_event in scheduler.round_times()[seen:]]
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {"rate": round(tokens / seconds, 2), "held_ms": round(statistics.median(held), 4)}
