"""The SDK against a real socket: typed events, one line per error, and nothing left running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
import trustme

from outrider import AsyncClient, Client
from outrider.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    OutriderError,
    Overloaded,
    ServerError,
    ServerUnreachable,
    Unavailable,
)
from outrider.events import Event, Finished, FinishReason, Started, Tokens, TokenSource
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from scheduler import errors as scheduler_errors
from scheduler.request import Speculation
from services.server import TlsFiles
from tools.proxy import FaultProxy
from tools.scripted_scheduler import CONTEXT, END_ID, ScriptedScheduler
from tools.served_gateway import served_gateway
from tools.waiting import until


async def collect(events: AsyncIterator[Event], into: list[object]) -> None:
    async for event in events:
        into.append(event)


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    return ScriptedScheduler(answer=(*b"hello", END_ID))


@pytest.fixture
async def address(scheduler: ScriptedScheduler) -> AsyncIterator[str]:
    async with served_gateway(scheduler) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address) as client:
        yield client


async def test_events_come_typed_in_order_with_one_end(client: AsyncClient) -> None:
    events = [event async for event in client.generate("say hello", seed=7)]
    first, *middle, last = events
    assert first == Started("sequence-1", "bytes", 7, len(b"say hello"))
    tokens = [event for event in middle if isinstance(event, Tokens)]
    assert len(tokens) == len(middle)
    assert [event.position for event in tokens] == [0, 2, 4]
    assert "".join(event.text for event in tokens) == "hello"
    assert tokens[0].sources == (TokenSource.ACCEPTED, TokenSource.BONUS)
    assert tokens[0].pieces == ("h", "e")
    assert len(tokens[0].prefix_digest) == 16
    assert isinstance(last, Finished)
    assert (last.finish_reason, last.completion_tokens) == (FinishReason.STOP, 6)
    assert (last.speculation.acceptance_rate, last.speculation.mode) == (0.75, "mixed")
    assert (last.duration, last.time_to_first_token) == (0.5, 0.25)


async def test_a_whole_answer_at_once(client: AsyncClient) -> None:
    completion = await client.complete("say hello")
    assert completion.text == "hello"
    assert completion.token_ids == (*b"hello", END_ID)
    assert len(completion.sources) == 6
    assert completion.finished.prompt_tokens == completion.started.prompt_tokens == 9


async def test_every_option_arrives(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    await client.complete(
        token_ids=[1, 2, 3],
        model="bytes",
        max_tokens=4,
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=9,
        stop_token_ids=[5],
        ignore_eos=True,
        speculation="off",
        draft_length=6,
        request_id="mine",
        timeout=20.0,
    )
    (request,) = scheduler.requests
    sampling = request.sampling
    assert request.token_ids == (1, 2, 3)
    assert (request.max_tokens, request.min_tokens, request.draft_length) == (4, 2, 6)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.25, 0.125)
    assert (sampling.seed, request.stop_token_ids, request.request_id) == (9, frozenset({5}), "mine")
    assert request.speculation is Speculation.OFF
    assert request.timeout is not None
    assert request.timeout == pytest.approx(20, abs=5)


async def test_zero_is_a_value_and_not_absence(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    await client.complete("hi", temperature=0, seed=0)
    assert (scheduler.requests[0].sampling.temperature, scheduler.requests[0].sampling.seed) == (0.0, 0)


async def test_a_chat(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    await client.complete(messages=[{"role": "user", "content": "hi"}])
    assert bytes(scheduler.requests[0].token_ids) == b"<user>hi\n<assistant>"


async def test_models_and_status(client: AsyncClient) -> None:
    (model,) = await client.models()
    assert (model.name, model.context_length, model.vocabulary_size) == ("bytes", CONTEXT, 257)
    status = await client.status()
    assert (status.ready, status.version, status.metadata_state) == (True, "0.1", "off")
    (worker,) = status.workers
    assert (worker.worker_id, worker.role, worker.state, worker.model) == ("target-1", "target", "ready", "bytes")
    assert worker.lease_remaining is None


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (scheduler_errors.Unavailable("no live target"), Unavailable),
        (scheduler_errors.Overloaded("busy", retry_after=2.5), Overloaded),
        (scheduler_errors.DeadlineExceeded("too late"), DeadlineExceeded),
        (scheduler_errors.SequenceFailed("a NaN row"), ServerError),
        (scheduler_errors.ModelNotFound("no such model"), ModelNotFound),
    ],
)
async def test_each_error_has_its_class_and_the_servers_line(
    client: AsyncClient,
    scheduler: ScriptedScheduler,
    raised: scheduler_errors.RequestError,
    expected: type[OutriderError],
) -> None:
    scheduler.fail_after, scheduler.error = 2, raised
    events: list[object] = []
    with pytest.raises(OutriderError) as caught:
        await collect(client.generate("hi"), events)
    assert type(caught.value) is expected
    assert str(caught.value) == str(raised)
    assert [type(event) for event in events] == [Started, Tokens]
    if isinstance(caught.value, Overloaded):
        assert caught.value.retry_after == 2.5


async def test_a_refused_field_is_named(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match=r"temperature is -1, must be in \[0, 100\]") as caught:
        await client.complete("hi", temperature=-1)
    assert (caught.value.field, caught.value.reason) == ("temperature", "INVALID_REQUEST")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": "hot"}, "temperature"),
        ({"speculation": "maybe"}, "speculation"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"token_ids": [1]}, "prompt"),
    ],
)
async def test_what_cannot_travel_is_refused_by_name(
    client: AsyncClient, options: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.complete("hi", **options)  # type: ignore[arg-type]
    assert caught.value.field == field


async def test_no_prompt_at_all_is_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="exactly one of prompt, messages and token_ids"):
        await client.complete()


async def test_nobody_there_is_one_line_with_the_cure() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(
            ServerUnreachable, match=r"no server at 127.0.0.1:1: start one with `outrider up`"
        ) as caught:
            await client.models()
        assert "\n" not in str(caught.value)


async def test_a_server_that_goes_away_is_told_with_what_had_come(scheduler: ScriptedScheduler) -> None:
    scheduler.gate.clear()
    scheduler.gated_from = 2
    async with served_gateway(scheduler) as server, FaultProxy(server) as proxy, AsyncClient(proxy.address) as client:
        events = client.generate("hi")
        while not isinstance(await anext(events), Tokens):
            pass
        await proxy.reset()
        with pytest.raises(ServerUnreachable, match="broke after 2 tokens"):
            await collect(events, [])
        await until(lambda: scheduler.running == 0, "the scheduler's iterator is closed")


async def test_leaving_the_loop_early_cancels_on_the_server(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    scheduler.gate.clear()
    async with aclosing(client.generate("hi")) as events:
        await anext(events)
        assert scheduler.running == 1
    await until(lambda: scheduler.running == 0, "the scheduler's iterator is closed")


async def test_cancelling_the_task_cancels_on_the_server(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    scheduler.gate.clear()
    task = asyncio.create_task(client.complete("hi"))
    await until(lambda: scheduler.running == 1, "it runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: scheduler.running == 0, "the scheduler's iterator is closed")


async def test_the_timeout_ends_the_call_on_both_sides(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    scheduler.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await client.complete("hi", timeout=0.3)
    await until(lambda: scheduler.running == 0, "the scheduler's iterator is closed")


async def test_closing_the_client_ends_what_runs(address: str, scheduler: ScriptedScheduler) -> None:
    client = AsyncClient(address)
    scheduler.gate.clear()
    task = asyncio.create_task(client.complete("hi"))
    await until(lambda: scheduler.running == 1, "it runs")
    await client.close()
    with pytest.raises((OutriderError, asyncio.CancelledError)):
        await task
    await until(lambda: scheduler.running == 0, "the scheduler's iterator is closed")


async def test_an_interrupted_connection_does_not_look_like_an_end(scheduler: ScriptedScheduler) -> None:
    scheduler.unending = True
    async with served_gateway(scheduler) as address, AsyncClient(address) as client:
        with pytest.raises(ServerError):
            await client.complete("hi")


class TestApiKeys:
    KEYS = ("first-key", "second-key")

    @pytest.fixture
    async def guarded(self, scheduler: ScriptedScheduler) -> AsyncIterator[str]:
        async with served_gateway(scheduler, self.KEYS) as address:
            yield address

    @pytest.mark.parametrize("key", KEYS)
    async def test_each_key_opens_everything(self, guarded: str, key: str) -> None:
        async with AsyncClient(guarded, api_key=key) as client:
            assert (await client.complete("hi")).text == "hello"
            assert await client.models()
            assert await client.status()

    @pytest.mark.parametrize("key", [None, "", "first", "first-key-and-more", "wrong"])
    async def test_without_a_valid_key_no_method_does_anything(
        self, guarded: str, key: str | None, scheduler: ScriptedScheduler
    ) -> None:
        async with AsyncClient(guarded, api_key=key) as client:
            for call in (client.complete("hi"), client.models(), client.status()):
                with pytest.raises(AuthenticationFailed, match="no valid API key"):
                    await call
        assert scheduler.requests == []
        assert scheduler.tokenizer_calls == 0

    async def test_health_needs_no_key_and_reflection_does(self, guarded: str) -> None:
        from grpc_health.v1 import health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection_pb2_grpc

        async with grpc.aio.insecure_channel(guarded) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest(service="liveness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_an_unknown_speculation_mode_is_refused(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        request = pb.GenerateRequest(text="hi")
        request.speculation = 9  # type: ignore[assignment]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.GenerationServiceStub(channel).Generate(request).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_error_of_ours_tells_the_caller_nothing_of_the_inside(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.fail_after, scheduler.error = 0, RuntimeError("the inside")  # type: ignore[assignment]
    with pytest.raises(ServerError, match="internal error") as caught:
        await client.complete("hi")
    assert "the inside" not in str(caught.value)


async def test_tls(scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(files.key))
    certificate.cert_chain_pems[0].write_to_path(str(files.certificate))
    async with served_gateway(scheduler, tls=files) as address:
        async with AsyncClient(address, tls_ca=tmp_path / "ca.pem") as client:
            assert (await client.complete("hi")).text == "hello"
        async with AsyncClient(address, tls=True) as client:
            with pytest.raises(ServerUnreachable):
                await client.models()


async def test_a_missing_certificate_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match=r"cannot read .*ca.pem"):
        AsyncClient(tls_ca=tmp_path / "ca.pem")


class TestSyncClient:
    """The thin wrapper, from another thread than the server's loop."""

    async def test_it_streams_completes_and_lists(self, address: str) -> None:
        def use() -> tuple[list[type], str, str, bool]:
            with Client(address) as client:
                kinds = [type(event) for event in client.generate("hi")]
                return kinds, client.complete("hi").text, client.models()[0].name, client.status().ready

        kinds, text, model, ready = await asyncio.to_thread(use)
        assert kinds == [Started, Tokens, Tokens, Tokens, Finished]
        assert (text, model, ready) == ("hello", "bytes", True)

    async def test_leaving_early_cancels_on_the_server(self, address: str, scheduler: ScriptedScheduler) -> None:
        def use() -> int:
            with Client(address) as client:
                for _ in client.generate("hi"):
                    break
                return threading.active_count()

        scheduler.gate.clear()
        await asyncio.to_thread(use)
        await until(lambda: scheduler.running == 0, "the scheduler's iterator is closed")

    async def test_errors_are_the_same(self, address: str) -> None:
        def use() -> None:
            with Client(address) as client:
                client.complete("hi", temperature=-1)

        with pytest.raises(InvalidRequest, match="temperature"):
            await asyncio.to_thread(use)

    def test_closing_ends_the_thread_and_a_closed_client_says_so(self) -> None:
        client = Client("127.0.0.1:1")
        client.close()
        client.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "outrider-client"]
        with pytest.raises(OutriderError, match="closed"):
            client.models()
