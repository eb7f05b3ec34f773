"""The whole path from a user's request to the text, with table models: one target worker, and for each drafter a
scheduler with a gateway in front. What a client is told through one of them is held against what plain decoding tells.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from types import TracebackType

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from outrider import events as sdk
from outrider.v1 import generation_service_pb2_grpc as generation_grpc
from scheduler.config import SchedulerConfig
from scheduler.request import Speculation, SpeculationSummary
from scheduler.scheduler import Scheduler
from services import generation_servicer
from services.gateway import Gateway
from services.generation import ChoiceFinished, ChoiceStarted, GatewayEvent, TextTokens, UserRequest
from services.generation_servicer import GenerationServicer
from services.server import Server, ServerConfig
from specdec.drafter import Drafter
from specdec.engine.model import LanguageModel
from specdec.grammar import MaskFactory
from specdec.grammars import check
from specdec.messages import DraftBlock, DraftItem, DraftResult, Identity, TargetItem, TargetResult, TokenizerBundle
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.characters import Writer
from tools.deployment import quick_config
from tools.identities import draft_identity
from tools.network import Endpoint, Network
from tools.process import SECRET
from tools.recorder import MemoryRecorder
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

PATIENCE = 120.0
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Logprobs:
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Told:
    """All of one choice that may not depend on speculation."""

    seed: int
    prompt_tokens: int
    text: str
    pieces: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: str
    stop_text: str | None
    completion_tokens: int

    def differences(self, plain: Told) -> list[str]:
        """Field by field; logprobs within the tolerance."""
        found = []
        for name in (one.name for one in fields(self)):
            ours, theirs = getattr(self, name), getattr(plain, name)
            if name == "logprobs":
                found += _logprob_differences(self.logprobs, plain.logprobs)
            elif ours != theirs:
                found.append(f"{name} is {ours!r}, plain {theirs!r}")
        return found


def _logprob_differences(ours: Sequence[Logprobs], plain: Sequence[Logprobs]) -> list[str]:
    if len(ours) != len(plain):
        return [f"{len(ours)} logprobs, plain has {len(plain)}"]
    return [
        f"logprobs[{i}] is {mine}, plain {its}"
        for i, (mine, its) in enumerate(zip(ours, plain, strict=True))
        if [token_id for token_id, _ in mine.top] != [token_id for token_id, _ in its.top]
        or any(
            not math.isclose(a, b, rel_tol=0.0, abs_tol=LOGPROB_TOLERANCE)
            for a, b in zip(
                [mine.logprob, *dict(mine.top).values()], [its.logprob, *dict(its.top).values()], strict=True
            )
        )
    ]


@dataclass(frozen=True, slots=True)
class Choice:
    told: Told
    summary: SpeculationSummary | sdk.Speculation


Events = Sequence[GatewayEvent] | Sequence[sdk.Event]


def read(events: Events) -> list[Choice]:
    """The choices of one answer, by index. Fails if the stream is not shaped as it must be."""
    by_index: dict[int, list[GatewayEvent | sdk.Event]] = {}
    for event in events:
        by_index.setdefault(event.index, []).append(event)
    return [_choice(by_index[index]) for index in range(len(by_index))]


def _choice(events: Sequence[GatewayEvent | sdk.Event]) -> Choice:
    first, *middle, last = events
    assert isinstance(first, (ChoiceStarted, sdk.Started))
    assert isinstance(last, (ChoiceFinished, sdk.Finished))
    pieces: list[str] = []
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []
    text = ""
    for event in middle:
        assert isinstance(event, (TextTokens, sdk.Tokens)), "more than one first or last event"
        assert event.position == len(token_ids)
        assert len(event.pieces) == len(event.token_ids) == len(event.sources)
        assert len(event.logprobs) in (0, len(event.token_ids))
        assert not event.pieces or "".join(event.pieces) == event.text
        event.text.encode()
        text += event.text
        pieces += event.pieces
        token_ids += event.token_ids
        logprobs += [Logprobs(told.logprob, told.top) for told in event.logprobs]
    assert last.completion_tokens == len(token_ids)
    assert len(logprobs) in (0, len(token_ids))
    told = Told(
        first.seed,
        first.prompt_tokens,
        text,
        tuple(pieces),
        tuple(token_ids),
        tuple(logprobs),
        last.finish_reason.value,
        last.stop_text,
        last.completion_tokens,
    )
    assert first.prompt_tokens == last.prompt_tokens
    return Choice(told, last.speculation)


@dataclass(frozen=True, slots=True)
class Station:
    """One scheduler and its gateway. draft: its draft worker, if it has one."""

    gateway: Gateway
    scheduler: Scheduler
    target: Endpoint[TargetItem, TargetResult]
    draft: Endpoint[DraftItem, DraftResult] | None

    async def ask(self, request: UserRequest) -> list[Choice]:
        return read([event async for event in self.gateway.generate(request)])

    async def one(self, request: UserRequest) -> Choice:
        (choice,) = await self.ask(request)
        return choice

    def kill_drafter_after(self, blocks: int) -> None:
        """SIGKILL, once the drafter has sent so many blocks; what it would send behind them is lost."""
        draft = self.draft
        assert draft is not None
        left = blocks

        def count(results: list[DraftResult]) -> list[DraftResult]:
            nonlocal left
            if left > 0:
                left -= sum(isinstance(result.body, DraftBlock) for result in results)
                return results
            if draft.reachable:
                draft.kill()
            return []

        draft.meddle = count


@dataclass
class Lab:
    """Async context manager. make_masks: a `MaskFactory` for each worker, since none serves two threads."""

    model: LanguageModel
    bundle: TokenizerBundle
    identity: Identity
    make_masks: Callable[[], MaskFactory] | None = None
    plain: Station = field(init=False)
    _exits: AsyncExitStack = field(init=False, default_factory=AsyncExitStack)
    _worker: TargetWorker = field(init=False)
    _stations: int = field(init=False, default=0)

    @classmethod
    def of(
        cls,
        writer: Writer,
        law: TableLaw,
        *,
        context_length: int = 512,
        model: TableModel | None = None,
        make_masks: Callable[[], MaskFactory] | None = None,
    ) -> Lab:
        model = model or TableModel(law, name=writer.name, context_length=context_length)
        bundle = replace(writer.bundle, context_length=model.context_length)
        return cls(model, bundle, writer.identity("target", model.context_length), make_masks)

    @property
    def num_forwards(self) -> int:
        return self._worker.load().steps

    @property
    def largest_batch(self) -> int:
        return self._worker.load().largest_batch

    async def __aenter__(self) -> Lab:
        config = TargetConfig("target", SECRET, max_sequences=1024)
        self._worker = TargetWorker(config, self.model, self.identity, self._mask())
        self._worker.start()
        self._exits.push_async_callback(asyncio.to_thread, self._worker.stop)
        self.plain = await self.station()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    async def station(self, drafter: Drafter | None = None, *, width: int = 1) -> Station:
        """Without a drafter it decodes plainly, whatever is asked."""
        number, self._stations = self._stations, self._stations + 1
        network = Network()
        target: Endpoint[TargetItem, TargetResult] = Endpoint("target", self._worker, self.bundle)
        network.add(target)
        draft: Endpoint[DraftItem, DraftResult] | None = None
        if drafter is not None:
            identity = draft_identity(f"draft-{number}", drafter=drafter.name)
            worker = DraftWorker(DraftConfig(identity.worker_id, SECRET), drafter, identity, self._mask())
            worker.start()
            self._exits.push_async_callback(asyncio.to_thread, worker.stop)
            draft = Endpoint("draft", worker)
            network.add(draft)
        scheduler = Scheduler(_config(number, width), network.make_link, MemoryRecorder())
        await scheduler.start()
        self._exits.push_async_callback(scheduler.close)
        for address, endpoint in network.endpoints.items():
            scheduler.add_worker(endpoint.worker.identity.role, address)

        async def settled() -> bool:
            return all(view.state == "ready" for view in await scheduler.workers())

        await until(settled, "every worker is ready")
        return Station(Gateway(scheduler, check_grammar=check), scheduler, target, draft)

    async def ask_plainly(self, request: UserRequest) -> list[Choice]:
        """The reference of every equality."""
        return await self.plain.ask(replace(request, speculation=Speculation.OFF, draft_length=None))

    async def plainly(self, request: UserRequest) -> Told:
        (choice,) = await self.ask_plainly(request)
        return choice.told

    def _mask(self) -> MaskFactory | None:
        return self.make_masks() if self.make_masks else None


@asynccontextmanager
async def served(station: Station) -> AsyncIterator[str]:
    """The gateway behind a real socket; yields the address."""
    server = Server(ServerConfig(("127.0.0.1:0",)))
    generation_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(station.gateway), server.grpc)
    (address,) = await server.start((generation_servicer.SERVICE_NAME,))
    try:
        yield address
    finally:
        await server.drain(0)


def _config(number: int, width: int) -> SchedulerConfig:
    """Nobody counts as late, however many sequences take turns on a busy machine."""
    return replace(
        quick_config(width=width),
        scheduler_id=f"scheduler-{number}",
        round_timeout=PATIENCE,
        draft_timeout=PATIENCE,
        min_draft_patience=PATIENCE,
        admission_timeout=PATIENCE,
        suspend_time=1.0,
    )
