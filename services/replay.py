"""Decodes a request again on a running server, without speculation and with it, and says where the answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as generation_grpc
from services.audit_files import AuditFile


@dataclass(frozen=True, slots=True)
class Replayed:
    """The answers in token ids: as it was served once, and as it comes now."""

    served: tuple[int, ...]
    plain: tuple[int, ...]
    speculative: tuple[int, ...]

    @property
    def differ_at(self) -> int | None:
        """Where plain and speculative decoding differ now; None if they do not."""
        return first_difference(self.plain, self.speculative)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two answers differ, or at which one of them has ended; None if they are equal."""
    for position, pair in enumerate(zip(one, other, strict=False)):
        if pair[0] != pair[1]:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


async def replay(channel: grpc.aio.Channel, file: AuditFile, api_key: str | None = None) -> Replayed:
    """Raises grpc.aio.AioRpcError."""
    plain = await _decode(channel, file.request, pb.SPECULATION_MODE_OFF, api_key)
    speculative = await _decode(channel, file.request, pb.SPECULATION_MODE_ON, api_key)
    return Replayed(file.served, plain, speculative)


async def _decode(
    channel: grpc.aio.Channel, request: pb.GenerateRequest, mode: pb.SpeculationMode.ValueType, api_key: str | None
) -> tuple[int, ...]:
    message = pb.GenerateRequest()
    message.CopyFrom(request)
    message.speculation = mode
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
    call = generation_grpc.GenerationServiceStub(channel).Generate(message, metadata=metadata)
    token_ids: list[int] = []
    try:
        async for response in call:
            token_ids += response.tokens.token_ids
    finally:
        call.cancel()
    return tuple(token_ids)
