"""`AsyncClient` and `Client`: text, chat and token ids in, committed tokens and text out.

async with AsyncClient() as client:
    async for event in client.generate("Once upon a time", max_tokens=50):
        if isinstance(event, Tokens):
            print(event.text, end="")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from outrider.errors import OutriderError, ServerError, from_rpc
from outrider.events import (
    Completion,
    Event,
    Finished,
    Model,
    Status,
    Tokens,
    decode_event,
    decode_model,
    decode_status,
)
from outrider.request import GenerateOptions, encode_request
from outrider.tracing import client_call
from outrider.v1 import control_service_pb2 as control
from outrider.v1 import control_service_pb2_grpc as control_grpc
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
CALL_SECONDS = 10.0
"""For `models` and `status`."""
MAX_MESSAGE_BYTES = 64 * 2**20

Answer = TypeVar("Answer")


class AsyncClient:
    """One channel to a server, made at the first call. Any number of calls may run at once.

    address: `HOST:PORT` or `unix:PATH`. tls: trust the system's authorities; tls_ca: trust this PEM file instead;
    tls_cert, tls_key: who we are, for servers that ask. Every method raises an `OutriderError`.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
    ) -> None:
        self.address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
        self._credentials = _credentials(tls_ca, tls_cert, tls_key) if tls or tls_ca or tls_cert else None
        self._channel_or_none: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what still runs."""
        channel, self._channel_or_none = self._channel_or_none, None
        if channel is not None:
            await channel.close(None)

    async def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Started, Tokens..., Finished, of each of the n choices; or raises.

        Leaving the loop early cancels the request, at the latest when the generator is closed (`contextlib.aclosing`
        does it at once).
        """
        request = encode_request(prompt, options)
        context = (options.get("traceparent", ""), options.get("tracestate", ""))
        with client_call(self.address, request.model, *context) as traced:
            call = pb_grpc.GenerationServiceStub(self._channel).Generate(
                request, timeout=options.get("timeout"), metadata=(*(self._metadata or ()), *traced.metadata)
            )
            received: int | None = None
            running = max(request.n, 1)
            try:
                async for message in call:
                    event = decode_event(message)
                    if event is None:
                        continue
                    received = (received or 0) + (len(event.token_ids) if isinstance(event, Tokens) else 0)
                    running -= isinstance(event, Finished)
                    if not running:
                        traced.finished()
                    yield event
                    if not running:
                        return
            except grpc.aio.AioRpcError as error:
                traced.failed(error)
                raise from_rpc(error, self.address, received) from None
            finally:
                call.cancel()
        raise ServerError(f"{self.address} ended the answer without its last event")

    async def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer of `generate`, with all its choices."""
        async with aclosing(self.generate(prompt, **options)) as events:
            every = [event async for event in events]
        try:
            return Completion.of(every)
        except ValueError:
            raise ServerError(f"{self.address} ended the answer without its first event") from None

    async def models(self, timeout: float | None = CALL_SECONDS) -> tuple[Model, ...]:
        """Models that are served now."""
        stub = pb_grpc.GenerationServiceStub(self._channel)
        response = await self._answer(stub.ListModels(pb.ListModelsRequest(), timeout=timeout, metadata=self._metadata))
        return tuple(decode_model(model) for model in response.models)

    async def status(self, timeout: float | None = CALL_SECONDS) -> Status:
        """Workers and load."""
        stub = control_grpc.ControlServiceStub(self._channel)
        return decode_status(
            await self._answer(stub.GetStatus(control.GetStatusRequest(), timeout=timeout, metadata=self._metadata))
        )

    @property
    def _channel(self) -> grpc.aio.Channel:
        """Belongs to the event loop that first asks."""
        if self._channel_or_none is None:
            options = _channel_options(self.address)
            if self._credentials is None:
                self._channel_or_none = grpc.aio.insecure_channel(self.address, options=options)
            else:
                self._channel_or_none = grpc.aio.secure_channel(self.address, self._credentials, options=options)
        return self._channel_or_none

    async def _answer(self, call: grpc.aio.UnaryUnaryCall[Any, Answer]) -> Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from None
        finally:
            call.cancel()


class Client:
    """`AsyncClient` for code without an event loop: one runs in a thread of its own until `close`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
    ) -> None:
        self._client = AsyncClient(address, api_key=api_key, tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what still runs and ends the thread."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generator[Event, None, None]:
        """As `AsyncClient.generate`. Leaving the loop early cancels the request."""
        events = self._client.generate(prompt, **options)
        try:
            while (event := self._run(anext(events, None))) is not None:
                yield event
        finally:
            if not self._loop.is_closed():
                self._run(events.aclose())

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        return self._run(self._client.complete(prompt, **options))

    def models(self, timeout: float | None = CALL_SECONDS) -> tuple[Model, ...]:
        return self._run(self._client.models(timeout))

    def status(self, timeout: float | None = CALL_SECONDS) -> Status:
        return self._run(self._client.status(timeout))

    def _run(self, work: Awaitable[Answer]) -> Answer:
        """Waits for work on the loop. If the wait is interrupted (Ctrl-C), the work is cancelled first."""
        if self._loop.is_closed():
            if isinstance(work, Coroutine):
                work.close()
            raise OutriderError("this client is closed")
        future = asyncio.run_coroutine_threadsafe(_await(work), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()
            raise


async def _await(work: Awaitable[Answer]) -> Answer:
    return await work


def _channel_options(address: str) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        # A stream is not repeated behind the caller's back.
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if address.startswith(("unix:", "127.", "localhost:", "[::1]:")):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy cannot reach this machine's own loopback
    return options


def _credentials(
    ca: str | Path | None, certificate: str | Path | None, key: str | Path | None
) -> grpc.ChannelCredentials:
    try:
        return grpc.ssl_channel_credentials(
            root_certificates=Path(ca).read_bytes() if ca else None,
            private_key=Path(key).read_bytes() if key else None,
            certificate_chain=Path(certificate).read_bytes() if certificate else None,
        )
    except OSError as error:
        raise OutriderError(f"cannot read {error.filename}: {error.strerror}") from error
