"""`GenerationService` over the gateway: convert, call, convert."""

from __future__ import annotations

import secrets
from contextlib import aclosing
from typing import Any

import grpc
from structlog.contextvars import bound_contextvars

from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from services import codec_generation as codec
from services.errors import abort
from services.gateway import Gateway

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(  # type: ignore[override]  # writes through the context, so that a cancel reaches `aclosing`
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        """Ends with exactly one terminal event: `finished`, or an error status."""
        metadata = _text_metadata(context)
        with bound_contextvars(request_id=request.request_id or f"req_{secrets.token_hex(16)}"):  # in its log lines
            try:
                generation = codec.decode_request(
                    request, context.time_remaining(), metadata.get("traceparent", ""), metadata.get("tracestate", "")
                )
                async with aclosing(self._gateway.generate(generation)) as events:
                    async for event in events:
                        await context.write(codec.encode_event(event))
            except Exception as error:
                await abort(context, error)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[codec.encode_model(model) for model in self._gateway.models()])


def _text_metadata(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}
