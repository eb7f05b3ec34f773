"""Workers and links without sockets: the scheduler's link seam laid straight over a worker's verbs, with faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from scheduler.links import AnyLink, LinkError
from specdec.messages import Identity, Load, Role, TokenizerBundle
from specdec.vocabulary import id_digests, read_tokens

Item = TypeVar("Item")
Result = TypeVar("Result")


ItemIn = TypeVar("ItemIn", contravariant=True)


class Worker(Protocol[ItemIn, Result]):
    """What `TargetWorker` and `DraftWorker` have in common."""

    @property
    def identity(self) -> Identity: ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def attach(self, deliver: Callable[[list[Result]], None]) -> int: ...
    def submit(self, session: int, items: Sequence[ItemIn]) -> None: ...
    def detach(self, session: int) -> None: ...
    def drain(self) -> None: ...
    def load(self) -> Load: ...


class Endpoint(Generic[Item, Result]):
    """One worker at one address, and what the network does to it. Used from the event loop, but for `identity`.

    delay: seconds that each batch of results takes. meddle: what becomes of each batch of results (drop, repeat,
    forge). items, results: everything that was sent to the worker and that reached the scheduler.
    """

    def __init__(
        self,
        address: str,
        worker: Worker[Item, Result],
        bundle: TokenizerBundle | None = None,
        tokenizer_json: bytes = b"",
    ) -> None:
        self.tokenizer_json = bundle.tokenizer_json if bundle else tokenizer_json
        self.address = address
        self.worker = worker
        self.bundle = bundle
        self.delay = 0.0
        self.meddle: Callable[[list[Result]], list[Result]] = list
        self.items: list[Item] = []
        self.results: list[Result] = []
        self.reachable = True
        self.frozen = False
        self._links: set[InProcessLink[Item, Result]] = set()
        self._asleep: list[Callable[[], None]] = []

    @property
    def open_streams(self) -> int:
        return len(self._links)

    def cut(self, cause: str = "planted: the connection was reset") -> None:
        """Every stream breaks; new ones can be opened. The worker notices, as a server does."""
        for link in list(self._links):
            link.break_off(cause)

    def kill(self) -> None:
        """SIGKILL: streams break, the worker's memory is gone, nothing answers until `replace`."""
        self.reachable = False
        self.cut("planted: the worker was killed")

    def replace(self, worker: Worker[Item, Result]) -> None:
        """Another process at the same address."""
        self.worker = worker
        self.reachable = True

    def freeze(self) -> None:
        """SIGSTOP: nothing goes in or out and no error shows. What comes meanwhile waits."""
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT: everything that waited arrives late."""
        self.frozen = False
        asleep, self._asleep = self._asleep, []
        for late in asleep:
            late()

    def attached(self, link: InProcessLink[Item, Result]) -> None:
        self._links.add(link)

    def detached(self, link: InProcessLink[Item, Result]) -> None:
        self._links.discard(link)

    def when_awake(self, act: Callable[[], None]) -> None:
        if self.frozen:
            self._asleep.append(act)
        else:
            act()


class InProcessLink(Generic[Item, Result]):
    """Implements `scheduler.links.WorkerLink`, for a target also `TargetLink`."""

    def __init__(self, address: str, endpoint: Endpoint[Item, Result] | None) -> None:
        self.address = address
        self._endpoint = endpoint
        self._worker: Worker[Item, Result] | None = None
        self._session = 0
        self._deliver: Callable[[Sequence[Result]], None] = _ignore
        self._lost: Callable[[str], None] = _ignore
        self._loop: asyncio.AbstractEventLoop | None = None

    async def identify(self) -> Identity:
        return (await self._reach()).worker.identity

    async def open(self, deliver: Callable[[Sequence[Result]], None], lost: Callable[[str], None]) -> None:
        endpoint = await self._reach()
        self._deliver, self._lost = deliver, lost
        self._loop = asyncio.get_running_loop()
        self._worker = endpoint.worker
        self._session = self._worker.attach(self._from_worker)
        endpoint.attached(self)

    def send(self, items: Sequence[Item]) -> None:
        worker, endpoint = self._worker, self._endpoint
        if worker is None or endpoint is None or not items:
            return
        session, sent = self._session, list(items)
        endpoint.items += sent
        endpoint.when_awake(lambda: worker.submit(session, sent))

    async def id_digests(self, run: int) -> bytes:
        endpoint = await self._reach()
        return id_digests(read_tokens(endpoint.tokenizer_json), run) if endpoint.tokenizer_json else b""

    async def load(self) -> Load:
        return (await self._reach()).worker.load()

    async def tokenizer(self) -> TokenizerBundle:
        bundle = (await self._reach()).bundle
        if bundle is None:
            raise LinkError(f"{self.address} has no tokenizer")
        return bundle

    async def close(self) -> None:
        self._detach()

    def break_off(self, cause: str) -> None:
        """The stream ends without a farewell."""
        if self._worker is not None:
            self._detach()
            self._lost(cause)

    def _detach(self) -> None:
        worker, endpoint = self._worker, self._endpoint
        if worker is None or endpoint is None:
            return
        self._worker = None
        endpoint.detached(self)
        session = self._session
        endpoint.when_awake(lambda: worker.detach(session))

    async def _reach(self) -> Endpoint[Item, Result]:
        await asyncio.sleep(0)
        endpoint = self._endpoint
        if endpoint is None or not endpoint.reachable:
            raise LinkError(f"{self.address}: nothing answers")
        if endpoint.frozen:
            awake = asyncio.Event()
            endpoint.when_awake(awake.set)
            await awake.wait()
        return endpoint

    def _from_worker(self, results: list[Result]) -> None:
        """On the worker's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop of a test that has ended
                self._loop.call_soon_threadsafe(self._arrive, results)

    def _arrive(self, results: list[Result]) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            return
        if endpoint.delay and self._loop is not None:
            self._loop.call_later(endpoint.delay, endpoint.when_awake, lambda: self._hand_over(results))
        else:
            endpoint.when_awake(lambda: self._hand_over(results))

    def _hand_over(self, results: list[Result]) -> None:
        endpoint = self._endpoint
        if self._worker is None or endpoint is None:
            return
        arrived = endpoint.meddle(results)
        endpoint.results += arrived
        if arrived:
            self._deliver(arrived)


class Network:
    """All endpoints by address; `make_link` is the scheduler's link factory."""

    def __init__(self) -> None:
        self.endpoints: dict[str, Endpoint[Any, Any]] = {}

    def add(self, endpoint: Endpoint[Any, Any]) -> None:
        self.endpoints[endpoint.address] = endpoint

    def make_link(self, role: Role, address: str) -> AnyLink:
        return InProcessLink(address, self.endpoints.get(address))


def _ignore(what: object) -> None:
    """Before the stream is open there is nobody to tell."""
