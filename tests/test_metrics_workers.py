"""Metrics of workers: exact for a script, bounded whatever comes, and the same for Prometheus and OTLP."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import grpc
import httpx2
import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as pb_grpc
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData

from draft_worker import counters as draft
from scheduler import counters as scheduler
from scheduler.request import GenerationRequest
from services.metrics import role_metrics
from services.start_error import StartError
from services.telemetry.metrics import MAX_SERIES, OTHER, Metrics
from services.telemetry.metrics_exposition import Exposition, metrics_endpoint
from services.telemetry.metrics_otlp import Export, data, otlp_metrics
from services.telemetry.otlp import resource
from target_worker import counters as target
from tools.cases import GREEDY
from tools.continuations import LawContinuation
from tools.deployment import quick_config
from tools.exposition import by_label, count, samples, value
from tools.monitored import Monitored
from tools.scripted import ScriptedDrafter, oracle
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw()
TRACEPARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def system(model: TableModel | None = None) -> Monitored:
    drafter = ScriptedDrafter(oracle, LawContinuation(LAW))
    return Monitored([model or TableModel(LAW)], [("scripted", drafter)], quick_config(4))


async def test_the_engine_counts_what_a_script_makes_it_do() -> None:
    """Ten rounds of four candidates and a token of the target's own, behind a prompt of 3."""
    running = system()
    async with running:
        await running.generate(GenerationRequest((1, 2, 3), GREEDY, max_tokens=50))
        engine, drafts = running.of["target-0"], running.of["draft-0"]

        assert by_label(engine, target.ROWS) == {"candidate": 40, "decode": 10, "prefill": 2}
        assert value(engine, target.COMMITTED_TOKENS) == 50
        assert value(engine, target.PREFIX_CACHE_QUERIES) == 3
        assert value(engine, target.KV_BLOCKS, "total") == 4096
        assert total(engine, target.ITERATION_TOKENS.name) == 52
        assert value(drafts, draft.DRAFTED_TOKENS, "scripted") == 40
        assert value(drafts, draft.DRAFTED_BLOCKS, "sent") == 10
        assert count(drafts, draft.QUEUE_TIME, drafter="scripted") == 10
        assert value(running.metrics, scheduler.NUM_DRAFT_TOKENS, "scripted") == 40
        assert value(running.metrics, scheduler.NUM_ACCEPTED_TOKENS, "scripted") == 40
        assert value(running.metrics, scheduler.PROMPT_TOKENS) == 3
        assert by_label(running.metrics, scheduler.DECISIONS) == {"draft": 10}
        assert by_label(running.metrics, scheduler.REQUEST_SUCCESS) == {"length": 1}
        assert value(running.metrics, scheduler.WORKERS, "target") == 1
        sent, received = (value(running.metrics, scheduler.WIRE_BYTES, way) for way in ("sent", "received"))

    assert sent > 50
    assert received > 50


def total(metrics: Metrics, name: str) -> float:
    return sum(v for (n, _), v in samples(metrics).items() if n == name.replace(".", "_") + "_sum")


def test_whatever_comes_a_metric_has_few_series() -> None:
    metrics = role_metrics("scheduler")
    for i in range(3 * MAX_SERIES):
        metrics.add(scheduler.NUM_DRAFTS, 1, f"drafter-{i}")
        metrics.observe(scheduler.TIME_TO_FIRST_TOKEN, 0.1, f"model-{i}")
    metrics.watch(scheduler.DRAFT_LINK_TIME, lambda: {(f"w-{i}",): 1.0 for i in range(3 * MAX_SERIES)})
    families = {family.metric: family.series for family in metrics.collect()}

    assert len(families[scheduler.NUM_DRAFTS]) == MAX_SERIES + 1
    assert dict(families[scheduler.NUM_DRAFTS])[(OTHER,)] == 2 * MAX_SERIES
    assert len(families[scheduler.TIME_TO_FIRST_TOKEN]) == MAX_SERIES + 1
    assert len(families[scheduler.DRAFT_LINK_TIME]) == MAX_SERIES


def test_labels_must_be_those_of_the_metric() -> None:
    with pytest.raises(ValueError, match=r"outrider\.spec_decode\.mode has the labels"):
        role_metrics("scheduler").add(scheduler.MODE, 1, "a", "b")


def test_exemplars_are_for_those_who_ask_for_open_metrics() -> None:
    metrics = role_metrics("scheduler")
    metrics.observe(scheduler.TIME_TO_FIRST_TOKEN, 0.3, "table", traceparent=TRACEPARENT)
    metrics.observe(scheduler.TIME_TO_FIRST_TOKEN, 0.7, "table", traceparent=TRACEPARENT[:-2] + "00")
    exposition = Exposition(metrics)
    text, kind = exposition.render("application/openmetrics-text; version=1.0.0")

    assert "openmetrics" in kind
    assert text.decode().count('trace_id="' + "ab" * 16) == 1  # the other one was not sampled
    assert b"# {" not in exposition.render()[0]
    points = encode_metrics(data(metrics, resource("scheduler", "s"))).resource_metrics[0].scope_metrics[0].metrics
    first = next(one for one in points if one.name == "gen_ai.server.time_to_first_token")
    assert [exemplar.trace_id.hex() for exemplar in first.histogram.data_points[0].exemplars] == ["ab" * 16]
    assert first.histogram.data_points[0].attributes[0].key == "gen_ai.request.model"
    assert first.unit == "s"
    assert first.histogram.data_points[0].count == 2


class Collector:
    """Takes metrics, or raises, as it is told."""

    def __init__(self) -> None:
        self.received: list[MetricsData] = []
        self.broken = False
        self.ended = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0) -> MetricExportResult:
        if self.broken:
            raise ConnectionError("planted")
        self.received.append(metrics_data)
        return MetricExportResult.SUCCESS

    def shutdown(self, timeout_millis: float = 0) -> None:
        self.ended = True


def test_the_last_counts_are_exported_even_if_it_never_was_time_before() -> None:
    metrics, collector = role_metrics("scheduler"), Collector()
    export = Export(metrics, collector, resource("scheduler", "s"), 3600)
    export.start()
    metrics.add(scheduler.GENERATION_TOKENS, 7)
    export.close()

    (told,) = collector.received
    series = {one.name: one for one in told.resource_metrics[0].scope_metrics[0].metrics}
    assert series["outrider.generation_tokens"].data.data_points[0].value == 7  # type: ignore[union-attr]
    assert told.resource_metrics[0].resource.attributes["service.name"] == "outrider-scheduler"
    assert collector.ended


def test_a_broken_collector_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics, collector = role_metrics("scheduler"), Collector()
    collector.broken = True
    export = Export(metrics, collector, resource("scheduler", "s"), 0.001)
    with caplog.at_level("WARNING"):
        export.start()
        export.close()

    assert collector.received == []
    assert len([record for record in caplog.records if "metrics cannot be sent" in record.message]) == 1


class MetricsReceiver(pb_grpc.MetricsServiceServicer):
    def __init__(self) -> None:
        self.requests: list[pb.ExportMetricsServiceRequest] = []

    async def Export(self, request: pb.ExportMetricsServiceRequest, context: object) -> pb.ExportMetricsServiceResponse:
        self.requests.append(request)
        return pb.ExportMetricsServiceResponse()


async def test_a_collector_receives_the_metrics_over_grpc() -> None:
    receiver = MetricsReceiver()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_MetricsServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    metrics = role_metrics("target")
    metrics.add(target.PREEMPTIONS, 3)
    exporting = ExitStack()
    exporting.enter_context(otlp_metrics(metrics, f"http://127.0.0.1:{port}", resource("target", "t-1"), 0.01))
    try:
        await until(lambda: bool(receiver.requests), "metrics arrive")
    finally:
        await asyncio.to_thread(exporting.close)  # its last export needs this loop
        await server.stop(0)

    told = receiver.requests[0].resource_metrics[0]
    assert {"service.name", "service.instance.id"} <= {attribute.key for attribute in told.resource.attributes}
    series = {metric.name: metric for metric in told.scope_metrics[0].metrics}
    assert series["outrider.num_preemptions"].sum.data_points[0].as_double == 3
    assert series["outrider.num_preemptions"].sum.is_monotonic


async def test_a_worker_serves_its_metrics_only_where_it_is_told_to() -> None:
    metrics = role_metrics("draft")
    with metrics_endpoint(metrics, "127.0.0.1", None) as url:
        assert url == ""
    with metrics_endpoint(metrics, "127.0.0.1", 0) as url:
        async with httpx2.AsyncClient(trust_env=False) as client:
            answer = await client.get(url)
        assert answer.status_code == 200
        assert 'outrider_build_info{role="draft"' in answer.text
        port = int(url.split(":")[2].split("/")[0])
        with (
            pytest.raises(StartError, match="choose another --metrics-port"),
            metrics_endpoint(metrics, "127.0.0.1", port),
        ):
            pass
