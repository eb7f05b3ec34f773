"""One request is one connected trace over client, scheduler, draft worker and target worker, however it ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Set
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import httpx2
import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from outrider import AsyncClient, Tokens
from outrider.errors import DeadlineExceeded
from outrider.request import GenerateOptions
from services.telemetry.otlp import resource
from services.telemetry.tracing import TracingConfig
from services.telemetry.tracing_export import ExportLimits, SpanQueue
from services.telemetry.tracing_start import SchedulerTracing
from tools.otlp_receiver import ReceivedSpan, Receiver, orphans, otlp_receiver
from tools.served_gateway import served_gateway
from tools.served_http import served_http
from tools.socket_deployment import SocketDeployment, WorkerProcess
from tools.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = "outrider.v1.GenerationService/Generate"
EVERY_SPAN = {
    CALL,
    "request",
    "queue",
    "prefill",
    "spec.draft",
    "spec.verify",
    "spec.commit",
    "target.prefill",
    "target.step",
    "draft.block",
}
EVERY_SERVICE = {"outrider-client", "outrider-scheduler", "outrider-draft", "outrider-target"}
ROUND_ATTRIBUTES = {f"spec_decode.{name}" for name in ("draft_length", "accepted", "mode", "epoch", "draft_worker")}
QUICK = ExportLimits(interval=0.02)


_first_tokens = itertools.count(3)


def options(max_tokens: int, timeout: float | None = None) -> GenerateOptions:
    """Each prompt is new: one that the target remembers it does not prefill."""
    prompt = [next(_first_tokens), 1, 4, 1, 5]
    return {"token_ids": prompt, "max_tokens": max_tokens, "seed": 9, "timeout": timeout}


@dataclass
class Traced:
    """Every call of `client` is sampled: its own tracer says so. traces: that were looked at."""

    system: SocketDeployment
    receiver: Receiver
    client: AsyncClient
    url: str
    traces: int = 0

    async def next_trace(
        self, *, names: Set[str] = EVERY_SPAN, services: Set[str] = EVERY_SERVICE
    ) -> list[ReceivedSpan]:
        """Of the client's latest call, once it has spans of these names and services; connected, and each told once."""
        self.traces += 1
        await until(lambda: bool(self._whole(names, services)), f"a trace with {sorted(names)} of {sorted(services)}")
        spans = self._whole(names, services)
        assert not orphans(spans)
        assert [span.service for span in spans if not span.parent_id] == ["outrider-client"]
        assert len({span.span_id for span in spans}) == len(spans)
        assert all(span.began <= span.ended for span in spans)
        return spans

    def tokens(self, trace_id: str, name: str) -> int:
        """What the spans of this name tell together."""
        spans = [span for span in self.receiver.trace(trace_id) if span.name == name]
        return sum(int(str(span.attributes["spec_decode.tokens"])) for span in spans)

    def _whole(self, names: Set[str], services: Set[str]) -> list[ReceivedSpan]:
        calls = [span for span in self.receiver.named(CALL) if span.service == "outrider-client"]
        if len(calls) < self.traces:
            return []
        spans = self.receiver.trace(calls[-1].trace_id)
        told = [span.name for span in spans]
        whole = told.count(CALL) == 2 and names <= set(told) and services <= {span.service for span in spans}
        return spans if whole else []


@asynccontextmanager
async def _tracer_of(provider: TracerProvider) -> AsyncIterator[None]:
    """As if the program had set it; what is really set stays for the tests of other files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "get_tracer", provider.get_tracer)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced() -> AsyncIterator[Traced]:
    async with otlp_receiver() as receiver:
        endpoint = receiver.endpoint
        tracing = SchedulerTracing.of(TracingConfig(endpoint, "scheduler", "scheduler-test", limits=QUICK))
        queue = SpanQueue(endpoint, QUICK)
        provider = TracerProvider(resource=resource("client", "client-test"))
        provider.add_span_processor(queue.processor)
        workers = f"--otlp-endpoint {endpoint} --delay 0.005 --context-length 2048"
        async with (
            _tracer_of(provider),
            SocketDeployment(
                [f"table_target {workers}"] * 2, [f"table_draft {workers}"], readers=[tracing.reader]
            ) as system,
            served_gateway(system.scheduler, tracing=tracing.interceptor) as address,
            served_http(system.scheduler, calls=tracing.calls) as url,
            AsyncClient(address) as client,
        ):
            yield Traced(system, receiver, client, url)
        await tracing.close()
        await asyncio.to_thread(queue.close)


def one(spans: list[ReceivedSpan], name: str, service: str = "outrider-scheduler") -> ReceivedSpan:
    (found,) = [span for span in spans if span.name == name and span.service == service]
    return found


async def test_a_request_is_one_connected_trace_with_every_span(traced: Traced) -> None:
    answer = await traced.client.complete(**options(40))
    spans = await traced.next_trace()
    assert {span.name for span in spans} == EVERY_SPAN
    (root,) = [span for span in spans if not span.parent_id]
    call, request = one(spans, CALL), one(spans, "request")
    assert root.service == "outrider-client"
    assert (call.parent_id, request.parent_id) == (root.span_id, call.span_id)
    assert all(span.parent_id == request.span_id for span in spans if span not in (root, call, request))
    assert request.attributes["gen_ai.usage.output_tokens"] == 40
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert call.attributes["rpc.response.status_code"] == "OK"
    rounds = [span for span in spans if span.name == "spec.verify" and span.attributes["spec_decode.mode"] != "plain"]
    speculation = answer.finished.speculation
    assert len(rounds) == speculation.num_drafts > 0
    assert sum(span.attributes["spec_decode.accepted"] for span in rounds) == speculation.num_accepted_tokens  # type: ignore[misc]
    assert {span.attributes["spec_decode.draft_worker"] for span in rounds} <= {"draft-0"}
    for name in ("spec.draft", "spec.verify", "spec.commit"):
        assert all(span.attributes.keys() >= ROUND_ATTRIBUTES for span in spans if span.name == name)
    for name in ("spec.commit", "target.step"):
        await until(lambda name=name: traced.tokens(request.trace_id, name) == 40, f"{name} of every token")  # type: ignore[misc]
    assert all(span.error is None for span in spans)
    assert all(root.began <= span.began <= span.ended for span in spans if span.service == "outrider-scheduler")
    assert {span.resource["service.instance.id"] for span in spans if span.service == "outrider-target"} < {
        "target-0",
        "target-1",
    }


async def test_a_cancelled_request_is_a_whole_trace_and_no_error(traced: Traced) -> None:
    async with aclosing(traced.client.generate(**options(400))) as events:
        async for event in events:
            if isinstance(event, Tokens) and event.position > 10:
                break
    spans = await traced.next_trace()
    assert one(spans, CALL).attributes["rpc.response.status_code"] == "CANCELLED"
    assert one(spans, CALL, "outrider-client").attributes["rpc.response.status_code"] == "CANCELLED"
    assert one(spans, "request").attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert all(span.error is None for span in spans)


async def test_a_deadline_is_an_error_from_client_to_sequence(traced: Traced) -> None:
    asked = options(1500, 2.0)  # 750 rounds of 10 ms each at least
    asked["draft_length"] = 1
    with pytest.raises(DeadlineExceeded):
        await traced.client.complete(**asked)
    # How far the answer came until then is the machine's affair.
    spans = await traced.next_trace(names={CALL, "request"}, services={"outrider-client", "outrider-scheduler"})
    for service in ("outrider-client", "outrider-scheduler"):
        assert one(spans, CALL, service).attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
        assert one(spans, CALL, service).error == "DEADLINE_EXCEEDED"


async def test_http_takes_the_callers_context_and_tells_a_cancel(traced: Traced) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "tracestate": "other=1"}
    body = {"prompt": [3, 1, 4], "max_tokens": 12, "seed": 3, "n": 2}
    async with httpx2.AsyncClient(base_url=traced.url, timeout=30, trust_env=False) as client:
        (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()
        endless = {**body, "n": 1, "max_tokens": 400, "stream": True}
        other = {"traceparent": f"00-{trace_id[::-1]}-{parent_id}-01"}
        async with client.stream("POST", "/v1/completions", json=endless, headers=other) as response:
            await anext(response.aiter_bytes())

    def told() -> list[ReceivedSpan]:
        """By the scheduler process; FastAPI has spans of its own where the program has a tracer."""
        spans = traced.receiver.named("POST /v1/completions")
        return sorted((span for span in spans if span.service == "outrider-scheduler"), key=lambda span: span.began)

    await until(lambda: len(told()) == 2, "both calls are told")
    whole, cancelled = told()
    assert (whole.trace_id, whole.parent_id) == (trace_id, parent_id)
    assert whole.attributes["http.response.status_code"] == 200
    requests = [span for span in traced.receiver.trace(trace_id) if span.name == "request"]
    assert [span.parent_id for span in requests] == [whole.span_id] * 2
    ours = [span for span in traced.receiver.trace(trace_id) if span.service != "outrider-client"]
    assert [span.span_id for span in orphans(ours)] == [whole.span_id]
    assert cancelled.attributes["outrider.cancelled"] is True
    assert "outrider.cancelled" not in whole.attributes


async def _kill_one(traced: Traced, processes: list[WorkerProcess], attribute: str) -> str:
    """Kills the worker that a long request uses, in the midst of it. Returns its name."""
    killed = ""
    async with aclosing(traced.client.generate(**options(300))) as events:
        async for event in events:
            if not killed and isinstance(event, Tokens) and event.position > 20:
                (record,) = traced.system.scheduler.sequences()
                killed = str(getattr(record, attribute))
                await processes[int(killed.rpartition("-")[2])].kill()
    return killed


async def test_a_killed_target_worker_is_a_failover_in_a_connected_trace(traced: Traced) -> None:
    killed = await _kill_one(traced, traced.system.targets, "target_worker")
    spans = await traced.next_trace()
    failover = one(spans, "failover")
    assert failover.attributes["outrider.from_worker"] == killed
    assert failover.attributes["outrider.target_worker"] != killed
    assert failover.attributes["outrider.cause"]
    assert len([span for span in spans if span.name == "prefill"]) == 2
    assert one(spans, "request").attributes["spec_decode.num_failovers"] == 1


async def test_a_killed_draft_worker_leaves_a_connected_trace(traced: Traced) -> None:
    killed = await _kill_one(traced, traced.system.drafts, "draft_worker")
    spans = await traced.next_trace()
    request = one(spans, "request")
    assert "fallback" in request.events
    assert request.error is None
    assert request.attributes["spec_decode.mode"] == "mixed"
    assert {span.attributes["spec_decode.draft_worker"] for span in spans if span.name == "spec.draft"} == {killed}
