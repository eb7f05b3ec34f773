"""`Scheduler`: owns the logs and is the only one who streams them. Stub of the interface; the body follows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.links import LinkFactory, Recorder
from scheduler.request import Event, GenerationRequest
from specdec.messages import Identity, Load, Role, TokenizerBundle


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as `outrider status` shows it. state: connecting, ready, refused, suspended, lost, draining."""

    address: str
    role: Role
    state: str
    detail: str
    identity: Identity | None
    load: Load | None


class Scheduler:
    def __init__(self, config: SchedulerConfig, make_link: LinkFactory, recorder: Recorder) -> None: ...

    async def start(self) -> None: ...

    def add_worker(self, role: Role, address: str) -> None:
        """From discovery or a static list: connects in the background and keeps trying. Known addresses are ignored."""

    def remove_worker(self, address: str) -> None:
        """Its lease expired or it drains: no new sequences, running ones move elsewhere when it is lost."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Started, Tokens..., Finished; or raises a RequestError. Closing the iterator cancels the sequence."""

    @property
    def ready(self) -> bool:
        """A live target."""

    def models(self) -> Sequence[Identity]:
        """Identities of the ready targets, one per model name."""

    async def tokenizer(self, model: str) -> TokenizerBundle:
        """From any ready target of that model ("" : the only one). Raises ModelNotFound, Unavailable."""

    async def workers(self) -> list[WorkerView]: ...

    def active_sequences(self) -> int: ...

    async def drain(self, timeout: float) -> None:
        """Takes no new sequences (they are refused with Unavailable) and waits for the running ones."""

    async def close(self) -> None: ...
