"""`TargetService` over a target worker: convert, call, convert."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.v1 import target_service_pb2 as pb
from outrider.v1 import target_service_pb2_grpc as pb_grpc
from services import codec_target
from services.progress import Progress
from services.worker_stream import MAX_PENDING_RESULTS, StreamCodec, StreamServer, StreamWorker
from specdec.messages import Release, TargetItem, TargetOpen, TargetResult, TokenizerBundle, VerifyBlock

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TargetService"].full_name
CHUNK_BYTES = 256 * 1024


def _owes(item: TargetItem) -> bool:
    """A bare grant may be used up already; everything else is answered."""
    body = item.body
    return isinstance(body, (TargetOpen, Release)) or (isinstance(body, VerifyBlock) and len(body.candidates) > 0)


_CODEC = StreamCodec[TargetItem, TargetResult, pb.VerifyRequest, pb.VerifyResponse](
    decode=lambda request: codec_target.decode_items(request.items),
    encode_result=codec_target.encode_result,
    make_response=lambda results: pb.VerifyResponse(results=results),
    owes=_owes,
)


class TargetServicer(pb_grpc.TargetServiceServicer):
    def __init__(
        self,
        worker: StreamWorker[TargetItem, TargetResult],
        bundle: TokenizerBundle,
        progress: Progress,
        max_pending_results: int = MAX_PENDING_RESULTS,
    ) -> None:
        self.streams = StreamServer(worker, _CODEC, progress, max_pending_results)
        self._info = _info(bundle)
        self._tokenizer_json = bundle.tokenizer_json

    async def Verify(  # type: ignore[override]  # writes through the context, so that a cancel reaches its `finally`
        self,
        request_iterator: AsyncIterator[pb.VerifyRequest],
        context: grpc.aio.ServicerContext[pb.VerifyRequest, pb.VerifyResponse],
    ) -> None:
        await self.streams.serve(request_iterator, context)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        yield pb.GetTokenizerResponse(info=self._info)
        for start in range(0, len(self._tokenizer_json), CHUNK_BYTES):
            yield pb.GetTokenizerResponse(tokenizer_json_chunk=self._tokenizer_json[start : start + CHUNK_BYTES])


def _info(bundle: TokenizerBundle) -> pb.TokenizerInfo:
    info = pb.TokenizerInfo(
        model_name=bundle.model_name,
        stop_token_ids=bundle.stop_token_ids,
        context_length=bundle.context_length,
        vocabulary_size=bundle.vocabulary_size,
        sha256=hashlib.sha256(bundle.tokenizer_json).hexdigest(),
        size_bytes=len(bundle.tokenizer_json),
        special_tokens=bundle.special_tokens,
    )
    if bundle.chat_template is not None:
        info.chat_template = bundle.chat_template
    if bundle.bos_token_id is not None:
        info.bos_token_id = bundle.bos_token_id
    return info
