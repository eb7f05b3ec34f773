"""`TargetLink` and `DraftLink` over gRPC: a worker in another process, as the scheduler sees it.

One channel per worker and one stream on it, which multiplexes all sequences.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import grpc

from outrider.v1 import control_service_pb2 as control_pb
from outrider.v1 import control_service_pb2_grpc as control_grpc
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import draft_service_pb2_grpc as draft_grpc
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import target_service_pb2_grpc as target_grpc
from scheduler.links import AnyLink, LinkError, LinkFactory
from services import codec_control, codec_draft, codec_target
from services.channel import ChannelConfig, open_channel
from services.codec import InvalidMessage
from services.link_stream import LinkCodec, LinkStream, link_errors
from services.wire_bytes import CountingChannel
from specdec.messages import (
    DraftItem,
    DraftResult,
    Identity,
    Load,
    Refusal,
    RefusalReason,
    Role,
    TargetItem,
    TargetResult,
    TokenizerBundle,
)
from specdec.metric import NO_COUNTERS, Counters

Item = TypeVar("Item", TargetItem, DraftItem)
Result = TypeVar("Result", TargetResult, DraftResult)
Answer = TypeVar("Answer")

MAX_TOKENIZER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Seconds. connect_timeout: `identify` and `open`; call_timeout: `load`; tokenizer_timeout: the whole bundle."""

    connect_timeout: float = 5.0
    call_timeout: float = 2.0
    tokenizer_timeout: float = 60.0
    channel: ChannelConfig = field(default_factory=ChannelConfig)


class _GrpcLink(ABC, Generic[Item, Result]):
    """What both roles share. Made anywhere, used from one event loop."""

    _codec: LinkCodec[Item, Result]

    def __init__(self, address: str, config: LinkConfig | None = None, counters: Counters = NO_COUNTERS) -> None:
        """address: `HOST:PORT` or `unix:PATH`."""
        self.address = address
        self._counters = counters
        self._config = config or LinkConfig()
        self._channel_or_none: grpc.aio.Channel | None = None
        self._stream: LinkStream[Item, Result] | None = None

    async def identify(self) -> Identity:
        stub = control_grpc.ControlServiceStub(self._channel)
        call = stub.GetIdentity(control_pb.GetIdentityRequest(), timeout=self._config.connect_timeout)
        try:
            response = await self._answer(call)
        except LinkError:
            if self._config.channel.tls is not None:  # a channel keeps its certificates; the next one reads them anew
                await self.close()
            raise
        try:
            return codec_control.decode_identity(response.identity)
        except InvalidMessage as error:
            raise LinkError(f"{self.address}: {error}") from error

    async def id_digests(self, run: int) -> bytes:
        stub = control_grpc.ControlServiceStub(self._channel)
        request = control_pb.GetIdentityRequest(vocabulary_run=run)
        return (await self._answer(stub.GetIdentity(request, timeout=self._config.connect_timeout))).id_digests

    async def load(self) -> Load:
        stub = control_grpc.ControlServiceStub(self._channel)
        response = await self._answer(stub.GetStatus(control_pb.GetStatusRequest(), timeout=self._config.call_timeout))
        if not response.workers:
            raise LinkError(f"{self.address} is no worker")
        return codec_control.decode_load(response.workers[0].load)

    async def open(self, deliver: Callable[[Sequence[Result]], None], lost: Callable[[str], None]) -> None:
        if self._stream is not None:
            await self._stream.close()
        stream = LinkStream(self._call(), self._codec, deliver, lost)
        try:
            await stream.start(self._config.connect_timeout)
        except LinkError as error:
            raise LinkError(f"{self.address}: {error}") from error
        self._stream = stream

    def send(self, items: Sequence[Item]) -> None:
        if self._stream is not None:
            self._stream.send(items)

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        channel, self._channel_or_none = self._channel_or_none, None
        try:
            if stream is not None:
                await stream.close()
        finally:
            if channel is not None:
                await channel.close(None)

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._channel_or_none is None:
            try:
                self._channel_or_none = open_channel(self.address, self._config.channel)
            except OSError as error:
                raise LinkError(f"{self.address}: cannot read {error.filename}: {error.strerror}") from error
        return self._channel_or_none

    def _counted(self, role: Role) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, CountingChannel(self._channel, self._counters, role))

    @abstractmethod
    def _call(self) -> grpc.aio.StreamStreamCall[Any, Any]: ...

    async def _answer(self, call: grpc.aio.UnaryUnaryCall[Any, Answer]) -> Answer:
        """The response of a call. Raises LinkError."""
        try:
            with link_errors():
                return await call
        except LinkError as error:
            raise LinkError(f"{self.address}: {error}") from error.__cause__
        finally:
            call.cancel()


class GrpcTargetLink(_GrpcLink[TargetItem, TargetResult]):
    _codec = LinkCodec[TargetItem, TargetResult](
        request=target_pb.VerifyRequest,
        fill=codec_target.fill_item,
        decode=lambda response: codec_target.decode_results(response.results),
        refuse=lambda item, why: TargetResult(item.header, Refusal(RefusalReason.INVALID, why)),
    )

    async def tokenizer(self) -> TokenizerBundle:
        """Raises LinkError, also if what arrives is not what its digest says."""
        stub = target_grpc.TargetServiceStub(self._channel)
        call = stub.GetTokenizer(target_pb.GetTokenizerRequest(), timeout=self._config.tokenizer_timeout)
        info: target_pb.TokenizerInfo | None = None
        content = bytearray()
        try:
            with link_errors():
                async for response in call:
                    if response.HasField("info"):
                        info = response.info
                    content += response.tokenizer_json_chunk
                    if len(content) > MAX_TOKENIZER_BYTES:
                        raise LinkError(f"its tokenizer is larger than {MAX_TOKENIZER_BYTES} bytes")
        except LinkError as error:
            raise LinkError(f"{self.address}: {error}") from error.__cause__
        finally:
            call.cancel()
        return _bundle(self.address, info, bytes(content))

    def _call(self) -> grpc.aio.StreamStreamCall[Any, Any]:
        return target_grpc.TargetServiceStub(self._counted(Role.TARGET)).Verify()  # type: ignore[call-arg]  # without an iterator the call is written to


class GrpcDraftLink(_GrpcLink[DraftItem, DraftResult]):
    _codec = LinkCodec[DraftItem, DraftResult](
        request=draft_pb.DraftRequest,
        fill=codec_draft.fill_item,
        decode=lambda response: codec_draft.decode_results(response.results),
        refuse=lambda item, why: DraftResult(item.header, Refusal(RefusalReason.INVALID, why)),
    )

    def _call(self) -> grpc.aio.StreamStreamCall[Any, Any]:
        return draft_grpc.DraftServiceStub(self._counted(Role.DRAFT)).Draft()  # type: ignore[call-arg]  # without an iterator the call is written to


def link_factory(config: LinkConfig | None = None, counters: Counters = NO_COUNTERS) -> LinkFactory:
    """What a `Scheduler` makes its links with."""

    def make_link(role: Role, address: str) -> AnyLink:
        kind = GrpcTargetLink if role is Role.TARGET else GrpcDraftLink
        return kind(address, config, counters)

    return make_link


def _bundle(address: str, info: target_pb.TokenizerInfo | None, tokenizer_json: bytes) -> TokenizerBundle:
    if info is None or len(tokenizer_json) != info.size_bytes:
        raise LinkError(f"{address}: its tokenizer arrived incomplete")
    if hashlib.sha256(tokenizer_json).hexdigest() != info.sha256:
        raise LinkError(f"{address}: its tokenizer does not have the digest that it says")
    return TokenizerBundle(
        model_name=info.model_name,
        tokenizer_json=tokenizer_json,
        chat_template=info.chat_template if info.HasField("chat_template") else None,
        bos_token_id=info.bos_token_id if info.HasField("bos_token_id") else None,
        stop_token_ids=tuple(info.stop_token_ids),
        context_length=info.context_length,
        vocabulary_size=info.vocabulary_size,
        special_tokens=dict(info.special_tokens),
    )
