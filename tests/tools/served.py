"""A fake worker behind a real socket, and a link to it that remembers what happened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from outrider.v1 import control_service_pb2_grpc, target_service_pb2_grpc
from services import control_servicer, target_servicer
from services.control_servicer import WorkerControlServicer
from services.links import GrpcTargetLink, LinkConfig
from services.progress import Progress
from services.server import Server, ServerConfig, TlsFiles
from services.target_servicer import TargetServicer
from services.worker_stream import MAX_PENDING_RESULTS
from specdec.candidates import CandidateTree
from specdec.messages import (
    Epoch,
    Grant,
    Header,
    Release,
    TargetItem,
    TargetOpen,
    TargetResult,
    TokenizerBundle,
    VerifyBlock,
)
from specdec.params import SamplingParams, StopConditions
from tools.fake_worker import BUNDLE, FakeTargetWorker
from tools.waiting import PATIENCE

EPOCH = Epoch(1, "scheduler-1")


def open_item(sequence_id: str, token_ids: Sequence[int] = (1, 2, 3)) -> TargetItem:
    header = Header(sequence_id, EPOCH, len(token_ids), bytes(16))
    stop = StopConditions(len(token_ids), len(token_ids) + 8)
    return TargetItem(header, TargetOpen(tuple(token_ids), SamplingParams(), stop, Grant(8), bytes(16)))


def verify_item(sequence_id: str, candidates: Sequence[int], base_length: int = 3) -> TargetItem:
    header = Header(sequence_id, EPOCH, base_length, bytes(16))
    return TargetItem(header, VerifyBlock(CandidateTree.chain(candidates), Grant(8)))


def release_item(sequence_id: str) -> TargetItem:
    return TargetItem(Header(sequence_id, EPOCH, 3, bytes(16)), Release())


@dataclass(slots=True)
class Ear:
    """What a link told: batches of results, and causes of loss."""

    batches: list[list[TargetResult]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    lost_event: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def results(self) -> list[TargetResult]:
        return [result for batch in self.batches for result in batch]

    def deliver(self, results: Sequence[TargetResult]) -> None:
        self.batches.append(list(results))
        self._changed.set()

    def lost(self, cause: str) -> None:
        self.losses.append(cause)
        self.lost_event.set()

    async def until(self, count: int, within: float = PATIENCE) -> list[TargetResult]:
        """Waits for that many results."""
        async with asyncio.timeout(within):
            while len(self.results) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.results

    async def until_lost(self, within: float = PATIENCE) -> str:
        async with asyncio.timeout(within):
            await self.lost_event.wait()
        return self.losses[0]


@dataclass(frozen=True, slots=True)
class Served:
    worker: FakeTargetWorker
    server: Server
    servicer: TargetServicer
    progress: Progress
    address: str


@contextlib.asynccontextmanager
async def served(
    worker: FakeTargetWorker | None = None,
    listen: str = "127.0.0.1:0",
    bundle: TokenizerBundle = BUNDLE,
    max_pending_results: int = MAX_PENDING_RESULTS,
    tls: TlsFiles | None = None,
) -> AsyncIterator[Served]:
    worker = worker or FakeTargetWorker()
    server = Server(ServerConfig((listen,), tls))
    progress = Progress(worker.load, 30.0)
    servicer = TargetServicer(worker, bundle, progress, max_pending_results)
    target_service_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    control = WorkerControlServicer(worker, "")
    control_service_pb2_grpc.add_ControlServiceServicer_to_server(control, server.grpc)
    (address,) = await server.start((target_servicer.SERVICE_NAME, control_servicer.SERVICE_NAME))
    worker.start()
    try:
        yield Served(worker, server, servicer, progress, address)
    finally:
        await server.drain(0)
        await asyncio.to_thread(worker.stop)


@contextlib.asynccontextmanager
async def linked(address: str, config: LinkConfig | None = None) -> AsyncIterator[tuple[GrpcTargetLink, Ear]]:
    link, ear = GrpcTargetLink(address, config), Ear()
    try:
        await link.open(ear.deliver, ear.lost)
        yield link, ear
    finally:
        await link.close()
