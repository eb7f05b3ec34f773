"""Throughput and held rounds of a scheduler that sends traces and metrics, against one that sends none.

Two scheduler processes in front of the same table models, a forward takes 20 ms. Each pair is eight short runs with 32
sequences, on-off-off-on or off-on-on-off twice, and four with one sequence that is always traced. Rounds are compared
within the pair: what drifts meanwhile hits both alike. Short runs, since 32 sequences fall into groups that a target
answers in turn, and how large these are is chance and stays so to the end of a run.

on: `otlp_endpoint` is set for scheduler and workers, so spans of sampled requests and, every 15 s as is the default,
all metrics go to an OpenTelemetry collector in this process. off: no endpoint. Counting and the journal for the page
have no switch and run in both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.plots import Bars
from bench.ratios import Goal, ratio
from bench.session import Result, Session

if TYPE_CHECKING:
    from bench.table_system import SchedulerProcess, TableSystem

SHARE_GOAL = Goal(0.98)
LOWER_END = 0.96
"""Of the interval of the share."""
HELD_GOAL = Goal(0.1, at_most=True, unit="ms")
DRAFT_LENGTH = 4
SOLO_TOKENS = 100
TRACED = f"00-{1:032x}-{2:016x}-01"
ON_FIRST = ("on", "off", "off", "on")
OFF_FIRST = ("off", "on", "on", "off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=20, help="pairs")
    parser.add_argument("--tokens", type=int, default=60, help="tokens per answer")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--sample-ratio", type=float, default=0.05, help="share of requests that are traced")


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    shares = ratio([row["on"]["rate"] / row["off"]["rate"] for row in rows], SHARE_GOAL)
    ratios = {
        "telemetry.on_vs_off": shares,
        "telemetry.held_ms_more": ratio(_more(rows, "held_ms"), HELD_GOAL),
        "telemetry.held_ms.off": ratio([row["off"]["held_ms"] for row in rows]),
        "telemetry.held_ms_more.1_sequence_traced": ratio(_more(rows, "held_ms", "_solo"), HELD_GOAL),
        "telemetry.held_ms.off.1_sequence": ratio([row["off_solo"]["held_ms"] for row in rows]),
        "telemetry.cpu_us_per_round_more": ratio(_more(rows, "cpu_us")),
    }
    chart = Bars(
        "telemetry",
        f"Telemetry on and off, {options.sequences} sequences",
        "tokens per second",
        {name: [row[name]["rate"] for row in rows] for name in ("off", "on")},
    )
    spans = sum(row["spans"] for row in rows)
    notes = (
        f"{len(rows)} pairs; a side of one is four runs of {options.sequences} sequences of {options.tokens} tokens, "
        f"{options.sample_ratio:.0%} of the requests traced, and two of one sequence that is traced; {spans:,} spans "
        f"arrived. on: scheduler and workers send spans, the scheduler all metrics every 15 s. off: nothing is sent; "
        f"counting and the journal, which have no switch, go on. held_ms: p50 of draft to verify + verdict to event of "
        f"all rounds of a side of a pair. The lower end of the interval of on_vs_off should be at least {LOWER_END}: "
        f"{'met' if shares.low >= LOWER_END else 'missed'}. {session.stopped_early}"
    )
    return Result("Telemetry on and off", ratios, notes.rstrip(), (chart,))


def _more(rows: Sequence[Any], figure: str, kind: str = "") -> list[float]:
    """Of on than of off, by pair."""
    return [row[f"on{kind}"][figure] - row[f"off{kind}"][figure] for row in rows]


@dataclass(slots=True)
class _Collector:
    """What arrived, undecoded: that would take time from what is measured. Messages of spans, exports of metrics."""

    endpoint: str = ""
    traces: list[bytes] = field(default_factory=list)
    metric_exports: int = 0

    def take_spans(self) -> int:
        """How many arrived since it was asked last."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        messages, self.traces = [ExportTraceServiceRequest.FromString(data) for data in self.traces], []
        return sum(len(scope.spans) for one in messages for part in one.resource_spans for scope in part.scope_spans)

    async def take_trace(self, data: bytes, context: object) -> bytes:
        self.traces.append(data)
        return b""

    async def take_metrics(self, data: bytes, context: object) -> bytes:
        self.metric_exports += 1
        return b""


@asynccontextmanager
async def _collector() -> AsyncIterator[_Collector]:
    """Takes traces and metrics as an OpenTelemetry collector does."""
    import grpc

    found = _Collector()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    for kind, take in (("trace.v1.TraceService", found.take_trace), ("metrics.v1.MetricsService", found.take_metrics)):
        handlers = {"Export": grpc.unary_unary_rpc_method_handler(take)}
        service = f"opentelemetry.proto.collector.{kind}"
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
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
        on = off | {
            "otlp_endpoint": collector.endpoint,
            "trace_sample_ratio": options.sample_ratio,
        }
        sends = f"--otlp-endpoint {collector.endpoint}"
        async with TableSystem(
            (f"bench.timed_workers --role target --seconds 0.02 {sends}",),
            (f"bench.timed_workers --role draft --agreement 0.9 --seconds 0.005 {sends}",),
            {"off": off, "on": on},
            watched=("off", "on"),
        ) as system:
            await _pair(system, options, -1)
            for key in session.todo([f"pair {i}" for i in range(options.prompts)]):
                collector.take_spans()
                row = await _pair(system, options, int(key.split()[1]))
                session.record(key, {**row, "spans": collector.take_spans()})


@dataclass(slots=True)
class _Side:
    """Of a pair. seconds: of its runs; held: milliseconds, of its rounds."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    held: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        return {
            "rate": round(self.tokens / self.seconds, 2),
            "held_ms": round(statistics.median(self.held), 4),
            "cpu_us": round(self.cpu_seconds / len(self.held) * 1e6, 1),
            "rounds": len(self.held),
        }


async def _pair(system: TableSystem, options: argparse.Namespace, number: int) -> dict[str, dict[str, float]]:
    order = ON_FIRST if number % 2 else OFF_FIRST
    sides = {name: _Side() for name in ("off", "on", "off_solo", "on_solo")}
    for turn, name in enumerate(order * 2):
        prompts = [(1, 5 + number, 3 + turn // 2 * 40 + i) for i in range(options.sequences)]
        await _run(system.schedulers[name], sides[name], prompts, options.tokens)
    for name in order:
        await _run(system.schedulers[name], sides[f"{name}_solo"], [(2, 5 + number, 3)], SOLO_TOKENS, TRACED)
    return {name: side.row() for name, side in sides.items()}


async def _run(
    scheduler: SchedulerProcess, side: _Side, prompts: Sequence[tuple[int, ...]], tokens: int, traceparent: str = ""
) -> None:
    """Both sides of a pair are asked the same."""
    scheduler.new_round_times()
    cpu, started = scheduler.cpu_seconds, time.perf_counter()
    asked = [
        scheduler.client.complete(
            token_ids=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, traceparent=traceparent
        )
        for prompt in prompts
    ]
    answers: list[Any] = await asyncio.gather(*asked)
    side.seconds += time.perf_counter() - started
    side.cpu_seconds += scheduler.cpu_seconds - cpu
    side.tokens += sum(len(answer.token_ids) for answer in answers)
    side.held += [to_verify + to_event for to_verify, to_event in scheduler.new_round_times()]
