"""Links over real sockets: many sequences on one stream, batches, losses, and nothing left behind."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import pytest

from outrider.v1 import target_service_pb2, target_service_pb2_grpc
from scheduler.links import LinkError
from services import codec_target
from services.channel import TARGET_MESSAGE_BYTES, open_channel
from services.links import GrpcDraftLink, GrpcTargetLink, LinkConfig, link_factory
from specdec.messages import Committed, Failure, Opened, Refusal, RefusalReason, Released, Role, TargetOpen
from tools.fake_worker import BUNDLE, IDENTITY, FakeTargetWorker
from tools.served import Ear, linked, open_item, release_item, served, verify_item
from tools.waiting import PATIENCE, until


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_one_stream_carries_many_sequences(kind: str, tmp_path: Path) -> None:
    listen = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/w.sock"
    async with served(listen=listen) as site, linked(site.address) as (link, ear):
        names = [f"s{i}" for i in range(50)]
        for name in names:
            link.send([open_item(name)])
        await ear.until(50)
        for i, name in enumerate(names):
            link.send([verify_item(name, [i, i + 1])])
        results = (await ear.until(100))[50:]
        assert {r.header.sequence_id: r.body.token_ids for r in results if isinstance(r.body, Committed)} == {
            name: (i, i + 1) for i, name in enumerate(names)
        }
        assert site.servicer.streams.open_streams == 1
        assert await link.identify() == IDENTITY
        assert (await link.load()).sequences == 50
        link.send([release_item(name) for name in names])
        assert all(isinstance(r.body, Released) for r in (await ear.until(150))[100:])
        assert (await link.load()).sequences == 0
        assert ear.losses == []


async def test_items_of_one_turn_travel_in_one_message() -> None:
    async with served() as site, linked(site.address) as (link, ear):
        for i in range(40):
            link.send([open_item(f"s{i}")])
        await ear.until(40)
        assert [len(items) for items in site.worker.submits] == [40]


async def test_results_that_wait_travel_in_one_message() -> None:
    worker = FakeTargetWorker(answers_per_block=200)
    async with served(worker) as site, linked(site.address) as (link, ear):
        link.send([open_item("s"), verify_item("s", [1])])
        await ear.until(201)
        assert [len(batch) for batch in ear.batches] == [201]


async def test_a_large_batch_is_split_and_a_single_large_item_still_passes() -> None:
    """gRPC's own limit is 4 MiB; a log of 2 million ids takes up to 10."""
    ids = tuple(range(2**28, 2**28 + 2_000_000))
    huge = open_item("huge", ids)
    assert codec_target.encode_item(huge).ByteSize() > 2 * TARGET_MESSAGE_BYTES
    big = open_item("big", ids[:500_000])
    async with served() as site, linked(site.address) as (link, ear):
        link.send([big] * 6 + [huge])
        await ear.until(7)
        assert len(site.worker.submits) == 7
        body = site.worker.submits[-1][0].body
        assert isinstance(body, TargetOpen)
        assert body.token_ids == ids
        assert ear.losses == []


async def test_a_bad_item_is_refused_alone() -> None:
    async with served() as site:
        channel = open_channel(site.address)
        good, bad = (codec_target.encode_item(open_item(name)) for name in ("good", "bad"))
        bad.open.sampling.temperature = float("nan")
        call = target_service_pb2_grpc.TargetServiceStub(channel).Verify()  # type: ignore[call-arg]
        try:
            await call.write(target_service_pb2.VerifyRequest(items=[bad, good]))
            answers: dict[str, object] = {}
            while len(answers) < 2:
                response = cast(target_service_pb2.VerifyResponse, await call.read())
                answers |= {r.header.sequence_id: codec_target.decode_result(r).body for r in response.results}
        finally:
            call.cancel()
            await channel.close(None)
        assert isinstance(answers["good"], Opened)
        refusal = answers["bad"]
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.INVALID
        assert "open.sampling: temperature is nan" in refusal.message


async def test_an_item_that_no_message_can_hold_is_refused_alone() -> None:
    async with served() as site, linked(site.address) as (link, ear):
        link.send([open_item("good"), open_item("bad", (1, -2)), open_item("good too")])
        kinds = {r.header.sequence_id: type(r.body) for r in await ear.until(3)}
        assert kinds == {"good": Opened, "bad": Refusal, "good too": Opened}


async def test_a_result_that_breaks_the_contract_fails_its_sequence_alone() -> None:
    worker = FakeTargetWorker()
    async with served(worker) as site, linked(site.address) as (link, ear):
        link.send([open_item("s"), open_item("t")])
        await ear.until(2)
        session = next(iter(worker.sessions))
        committed = Committed((1, 2), ())
        for name in ("s", "t"):
            result = replace(ear.results[0], header=open_item(name).header)
            worker.sessions[session]([replace(result, body=committed) if name == "s" else result])
        kinds = {r.header.sequence_id: type(r.body) for r in (await ear.until(4))[2:]}
        assert kinds == {"s": Failure, "t": Opened}


async def test_after_close_no_call_and_no_session_is_left() -> None:
    """20 of 20: an aio stream that is merely dropped stays open on the server."""
    async with served() as site:
        for _ in range(20):
            async with linked(site.address) as (link, ear):
                link.send([open_item("s")])
                await ear.until(1)
            assert ear.losses == []
        await until(lambda: site.servicer.streams.open_streams == 0, "no open stream")
        assert sorted(site.worker.detached) == list(range(1, 21))
        assert site.worker.load().sequences == 0


async def test_what_was_queued_before_close_is_still_sent() -> None:
    async with served() as site:
        async with linked(site.address) as (link, ear):
            link.send([open_item("s")])
            await ear.until(1)
            link.send([release_item("s")])
        await until(lambda: len(site.worker.submits) == 2, "the release arrived")


async def test_a_scheduler_that_drops_its_connection_is_detached() -> None:
    async with served() as site:
        channel = open_channel(site.address)
        call = target_service_pb2_grpc.TargetServiceStub(channel).Verify()  # type: ignore[call-arg]
        await call.write(target_service_pb2.VerifyRequest(items=[codec_target.encode_item(open_item("s"))]))
        await call.read()
        assert site.worker.load().sequences == 1
        await channel.close(None)
        await until(lambda: site.worker.detached == [1], "the stream is detached")
        assert site.worker.load().sequences == 0


async def test_lost_is_told_once_when_the_server_stops() -> None:
    async with served() as site, linked(site.address) as (link, ear):
        link.send([open_item("s")])
        await ear.until(1)
        await site.server.drain(0)
        assert await ear.until_lost()
        link.send([open_item("t")])  # dropped, and no error
        await link.close()
        assert len(ear.losses) == 1


async def test_a_link_can_be_opened_again_after_it_was_lost() -> None:
    async with served() as site, linked(site.address) as (link, ear):
        site.servicer.streams.finish()
        assert await ear.until_lost() == "the worker ended the stream"
        again = Ear()
        await link.open(again.deliver, again.lost)
        link.send([open_item("s")])
        await again.until(1)
        assert len(ear.losses) == 1
        assert again.losses == []


async def test_a_scheduler_that_does_not_read_is_ended() -> None:
    worker = FakeTargetWorker(answers_per_block=2000)
    async with served(worker, max_pending_results=3000) as site:
        channel = open_channel(site.address)
        call = target_service_pb2_grpc.TargetServiceStub(channel).Verify()  # type: ignore[call-arg]
        try:
            for i in range(200):
                items = [codec_target.encode_item(verify_item(f"s{i}", list(range(200))))]
                await call.write(target_service_pb2.VerifyRequest(items=items))
                if worker.detached:
                    break
            await until(lambda: worker.detached == [1], "the stream is detached")
            while True:
                if await call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
                    break
        except grpc.RpcError:
            pass
        finally:
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            call.cancel()
            await channel.close(None)
        assert site.servicer.streams.open_streams == 0


async def test_a_worker_that_does_not_read_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.link_stream.MAX_QUEUED_ITEMS", 100)
    async with served() as site, linked(site.address) as (link, ear):
        link.send([open_item(f"s{i}") for i in range(101)])
        assert ear.losses == []  # not from inside `send`
        assert "100 items" in await ear.until_lost()
        link.send([open_item("t")])
        await until(lambda: site.servicer.streams.open_streams == 0, "no open stream")
        await link.close()
        assert len(ear.losses) == 1


async def test_a_deliver_that_fails_is_a_loss_and_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as site:
        link, ear = GrpcTargetLink(site.address), Ear()

        def deliver(results: object) -> None:
            raise ZeroDivisionError

        await link.open(deliver, ear.lost)
        link.send([open_item("s")])
        assert "internal error: ZeroDivisionError" in await ear.until_lost()
        await link.close()
        assert len(ear.losses) == 1


async def test_closing_a_link_while_it_is_used_is_an_error_and_no_cancel() -> None:
    """Whoever awaits must not take the end of the call for a cancel of its own task."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        link, ear = GrpcTargetLink(f"127.0.0.1:{mute.getsockname()[1]}"), Ear()
        waiting = [
            asyncio.ensure_future(work)
            for work in (link.identify(), link.load(), link.tokenizer(), link.open(ear.deliver, ear.lost))
        ]
        await asyncio.sleep(0)  # one turn, in which all of them start
        await link.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE)
        assert [type(outcome) for outcome in outcomes] == [LinkError] * 4
        assert ear.losses == []


async def test_nobody_there_is_one_line_within_the_time() -> None:
    link = GrpcTargetLink("127.0.0.1:1", LinkConfig(connect_timeout=3))
    ear = Ear()
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:1") as caught:
        await link.identify()
    assert "\n" not in str(caught.value)
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:1"):
        await link.open(ear.deliver, ear.lost)
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:1"):
        await link.load()
    await link.close()
    assert ear.losses == []


async def test_a_listener_that_says_nothing_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel accepts, nobody answers
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        link, ear = GrpcTargetLink(address, LinkConfig(connect_timeout=0.5)), Ear()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(LinkError, match=r"0\.5 s"):
                await link.open(ear.deliver, ear.lost)
            with pytest.raises(LinkError, match="deadline exceeded"):
                await link.identify()
            await link.close()


async def test_the_tokenizer_arrives_whole_and_checked() -> None:
    bundle = replace(BUNDLE, tokenizer_json=b"{}" * 6_000_000, chat_template=None, bos_token_id=None)
    async with served(bundle=BUNDLE) as site, linked(site.address) as (link, _):
        assert await link.tokenizer() == BUNDLE
    async with served(bundle=bundle) as site, linked(site.address) as (link, _):
        assert await link.tokenizer() == bundle


@pytest.mark.parametrize(("content", "problem"), [(b"y" * 10, "digest"), (b"x" * 9, "incomplete")])
async def test_a_tokenizer_that_is_not_what_it_says_is_refused(content: bytes, problem: str) -> None:
    class Liar(target_service_pb2_grpc.TargetServiceServicer):
        async def GetTokenizer(self, request: object, context: object):  # type: ignore[no-untyped-def]
            digest = hashlib.sha256(b"x" * 10).hexdigest()
            yield target_service_pb2.GetTokenizerResponse(
                info=target_service_pb2.TokenizerInfo(sha256=digest, size_bytes=10)
            )
            yield target_service_pb2.GetTokenizerResponse(tokenizer_json_chunk=content)

        Verify = target_service_pb2_grpc.TargetServiceServicer.Verify

    server = grpc.aio.server()
    target_service_pb2_grpc.add_TargetServiceServicer_to_server(Liar(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = GrpcTargetLink(f"127.0.0.1:{port}")
    try:
        with pytest.raises(LinkError, match=problem):
            await link.tokenizer()
    finally:
        await link.close()
        await server.stop(0)


async def test_a_proxy_of_the_environment_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with served() as site, linked(site.address) as (link, _):
        assert await link.identify() == IDENTITY


async def test_deliver_and_lost_come_in_the_event_loop() -> None:
    threads: set[str] = set()
    async with served() as site:
        link, gone = GrpcTargetLink(site.address), asyncio.Event()
        heard = asyncio.Event()

        def deliver(results: object) -> None:
            threads.add(threading.current_thread().name)
            heard.set()

        def lost(cause: str) -> None:
            threads.add(threading.current_thread().name)
            gone.set()

        await link.open(deliver, lost)
        link.send([open_item("s")])
        await asyncio.wait_for(heard.wait(), PATIENCE)
        site.servicer.streams.finish()
        await asyncio.wait_for(gone.wait(), PATIENCE)
        await link.close()
    assert threads == {threading.current_thread().name}


def test_the_factory_makes_a_link_by_role() -> None:
    make = link_factory()
    assert isinstance(make(Role.TARGET, "127.0.0.1:1"), GrpcTargetLink)
    assert isinstance(make(Role.DRAFT, "127.0.0.1:1"), GrpcDraftLink)
