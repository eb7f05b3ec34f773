"""What a target worker and a draft worker have in common: one loop on a thread of its own, fed by many streams."""

from __future__ import annotations

import copy
import logging
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from specdec.mailbox import Mailbox
from specdec.messages import Identity, Load

_log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Outgoing = defaultdict[int, list[Result]]
"""Results by the session that they are addressed to."""


class Worker(ABC, Generic[Item, Result]):
    """Streams come and go on other threads; the model is touched by the loop's own thread only."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._load = Load()
        self._mailbox: Mailbox[Item, Result] = Mailbox()
        self.crash: Exception | None = None
        """What ended the loop, if a fault of ours did: the worker answers nobody any more and must be replaced."""
        self._thread = threading.Thread(target=self._run, name=f"{identity.role.value}-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the running forward and joins its thread."""
        self._mailbox.stop()
        self._thread.join()

    def attach(self, deliver: Callable[[list[Result]], None]) -> int:
        """A scheduler's stream opened; returns the session that its items are submitted under. `deliver` is called on
        the worker's thread."""
        return self._mailbox.attach(deliver)

    def submit(self, session: int, items: Sequence[Item]) -> None:
        """Queues items; never blocks."""
        self._mailbox.submit(session, items)

    def detach(self, session: int) -> None:
        """The stream ended: what it had open is released."""
        self._mailbox.detach(session)

    def load(self) -> Load:
        """A snapshot of the counters."""
        return copy.copy(self._load)

    @abstractmethod
    def drain(self) -> None:
        """Takes no new sequences; running ones go on."""

    @abstractmethod
    def _turn(self, outgoing: Outgoing[Result]) -> bool:
        """Takes what came and does one step of work; False if there was none to do."""

    @abstractmethod
    def _idle_for(self) -> float | None:
        """Seconds until there may be work without a message; None: only a message brings some."""

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            _log.critical("the worker's loop ended", exc_info=True)
            self.crash = error

    def _loop(self) -> None:
        while not self._mailbox.stopped:
            outgoing: Outgoing[Result] = defaultdict(list)
            worked = self._turn(outgoing)
            self._mailbox.send(outgoing)
            if not worked:
                self._mailbox.wait(self._idle_for())
