"""`ControlService`: who a process is and how it does. One servicer for workers, one for the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, Protocol

import grpc

from outrider.v1 import control_service_pb2 as pb
from outrider.v1 import control_service_pb2_grpc as pb_grpc
from scheduler.scheduler import WorkerView
from services import codec_control, codec_rounds
from services.codec import InvalidMessage, encode_duration
from services.codec_control import SequenceView
from services.errors import abort
from services.rounds import RoundStore
from services.rounds_figures import SECONDS, SHOWN_SECONDS
from specdec.messages import Identity, Load
from specdec.vocabulary import id_digests, read_tokens

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ControlService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class ReportedWorker(Protocol):
    @property
    def identity(self) -> Identity: ...

    def load(self) -> Load: ...


class ReportedScheduler(Protocol):
    """The part of `Scheduler` that a status is made of."""

    @property
    def ready(self) -> bool: ...

    async def workers(self) -> Sequence[WorkerView]: ...

    def active_sequences(self) -> int: ...


class WorkerControlServicer(pb_grpc.ControlServiceServicer):
    """state: `ready`, `suspended` (it does not step) or `draining`; and the version that the process runs."""

    def __init__(
        self,
        worker: ReportedWorker,
        address: str,
        state: Callable[[], str] = lambda: "ready",
        tokenizer_json: bytes | None = None,
    ) -> None:
        self._worker = worker
        self._tokenizer_json = tokenizer_json
        self._state = state
        self._started = time.monotonic()
        self.address = address

    async def GetIdentity(self, request: pb.GetIdentityRequest, context: Context) -> pb.GetIdentityResponse:
        response = pb.GetIdentityResponse(identity=codec_control.encode_identity(self._worker.identity))
        if request.HasField("vocabulary_run") and self._tokenizer_json is not None:
            response.id_digests = await asyncio.to_thread(_id_digests, self._tokenizer_json, request.vocabulary_run)
        return response

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        identity, load, state = self._worker.identity, self._worker.load(), self._state()
        view = WorkerView(self.address, identity.role, state, "", identity, load)
        return pb.GetStatusResponse(
            ready=state == "ready",
            version=identity.version,
            workers=[codec_control.encode_worker(view)],
            active_sequences=load.sequences,
            metadata_state="off",
            uptime=encode_duration(time.monotonic() - self._started),
        )

    async def GetRounds(self, request: pb.GetRoundsRequest, context: Context) -> pb.GetRoundsResponse:
        return await _of_schedulers_only(context)

    async def GetFigures(self, request: pb.GetFiguresRequest, context: Context) -> pb.GetFiguresResponse:
        return await _of_schedulers_only(context)


async def _of_schedulers_only(context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a worker keeps no rounds: ask the gateway")


class SchedulerControlServicer(pb_grpc.ControlServiceServicer):
    """sequences: at most so many of the running ones. metadata_state: `connected`, `down` or `off`.

    leases: seconds left by worker address; a worker from a static list has none. rounds: of its journals.
    """

    def __init__(
        self,
        scheduler: ReportedScheduler,
        version: str,
        sequences: Callable[[int], Sequence[SequenceView]] = lambda limit: (),
        metadata_state: Callable[[], str] = lambda: "off",
        leases: Callable[[], Awaitable[dict[str, float]]] | None = None,
        rounds: RoundStore | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._version = version
        self._sequences = sequences
        self._metadata_state = metadata_state
        self._leases = leases
        self._rounds = rounds or RoundStore()
        self._started = time.monotonic()

    async def GetIdentity(self, request: pb.GetIdentityRequest, context: Context) -> pb.GetIdentityResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a scheduler is no worker; ask GetStatus")
        raise AssertionError("abort returns never")

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        leases = await self._leases() if self._leases is not None else {}
        views = await self._scheduler.workers()
        sequences = self._sequences(request.max_sequences) if request.max_sequences else ()
        return pb.GetStatusResponse(
            ready=self._scheduler.ready,
            version=self._version,
            workers=[codec_control.encode_worker(view, leases.get(view.address)) for view in views],
            sequences=[codec_control.encode_sequence(view) for view in sequences],
            active_sequences=self._scheduler.active_sequences(),
            metadata_state=self._metadata_state(),
            uptime=encode_duration(time.monotonic() - self._started),
        )

    async def GetRounds(self, request: pb.GetRoundsRequest, context: Context) -> pb.GetRoundsResponse:
        now = time.monotonic()
        if request.request:
            found = self._rounds.find(request.request)
        else:
            found = self._rounds.since(now - request.within.ToNanoseconds() / 1e9)
        response = pb.GetRoundsResponse()
        for rounds in found:
            response.sequences.append(codec_rounds.encode_rounds(rounds, time.time() - now))
            await asyncio.sleep(0)  # a long journal takes milliseconds, and others have tokens to stream
        return response

    async def GetFigures(self, request: pb.GetFiguresRequest, context: Context) -> pb.GetFiguresResponse:
        if request.seconds > SECONDS:
            await abort(context, InvalidMessage("seconds", f"is {request.seconds}, must be at most {SECONDS}"))
        return codec_rounds.encode_figures(self._rounds.figures.figures(request.seconds or SHOWN_SECONDS))


def _id_digests(tokenizer_json: bytes, run: int) -> bytes:
    """Asked only when two vocabularies differ, so the tokens are not kept for it."""
    return id_digests(read_tokens(tokenizer_json), run)
