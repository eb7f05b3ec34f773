"""`DraftService` over a draft worker: convert, call, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import draft_service_pb2_grpc as pb_grpc
from services import codec_draft
from services.progress import Progress
from services.worker_stream import MAX_PENDING_RESULTS, StreamCodec, StreamServer, StreamWorker
from specdec.messages import DraftAdvance, DraftItem, DraftOpen, DraftResult, Release

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["DraftService"].full_name


def _owes(item: DraftItem) -> bool:
    """Where nothing is to be drafted, nothing is answered."""
    body = item.body
    return isinstance(body, Release) or (isinstance(body, (DraftOpen, DraftAdvance)) and body.plan.draft_length > 0)


_CODEC = StreamCodec[DraftItem, DraftResult, pb.DraftRequest, pb.DraftResponse](
    decode=lambda request: codec_draft.decode_items(request.items),
    encode_result=codec_draft.encode_result,
    make_response=lambda results: pb.DraftResponse(results=results),
    owes=_owes,
)


class DraftServicer(pb_grpc.DraftServiceServicer):
    def __init__(
        self,
        worker: StreamWorker[DraftItem, DraftResult],
        progress: Progress,
        max_pending_results: int = MAX_PENDING_RESULTS,
    ) -> None:
        self.streams = StreamServer(worker, _CODEC, progress, max_pending_results)

    async def Draft(  # type: ignore[override]  # writes through the context, so that a cancel reaches its `finally`
        self,
        request_iterator: AsyncIterator[pb.DraftRequest],
        context: grpc.aio.ServicerContext[pb.DraftRequest, pb.DraftResponse],
    ) -> None:
        await self.streams.serve(request_iterator, context)
