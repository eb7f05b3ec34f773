"""A target worker without a model, for tests of the wire: it answers each item at once, on its own thread.

As a program (`python tests/tools/fake_worker.py ADDRESS`) it serves itself, and prints its address when it is ready.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from services.worker_process import ServeOptions, serve_target
from specdec.commit import TokenSource
from specdec.messages import (
    Committed,
    Identity,
    Load,
    Opened,
    Released,
    Role,
    TargetItem,
    TargetOpen,
    TargetResult,
    TokenizerBundle,
    VerifyBlock,
)

IDENTITY = Identity("target-fake", Role.TARGET, "fake", 100, "ab" * 32, b"\x01" * 32, 64, "0.1")
BUNDLE = TokenizerBundle("fake", bytes(range(256)) * 4000, "{{ x }}", 1, (2, 3), 64, 100, {"bos_token": "<s>"})

Deliver = Callable[[list[TargetResult]], None]


class FakeTargetWorker:
    """A block is answered by committing its candidates, once for each of `answers_per_block`.

    gate: while cleared the worker holds what it has and does not step. submits: items of each `submit`.
    """

    def __init__(self, answers_per_block: int = 1) -> None:
        self.identity = IDENTITY
        self.crash: Exception | None = None
        self.answers_per_block = answers_per_block
        self.gate = threading.Event()
        self.gate.set()
        self.submits: list[list[TargetItem]] = []
        self.sessions: dict[int, Deliver] = {}
        self.detached: list[int] = []
        self.draining = False
        self._counters = Load()
        self._open: dict[str, int] = {}
        self._inbox: list[tuple[int, TargetItem]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._next_session = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self.gate.set()
        self._thread.join()

    def attach(self, deliver: Deliver) -> int:
        with self._wake:
            self._next_session += 1
            self.sessions[self._next_session] = deliver
            return self._next_session

    def submit(self, session: int, items: Sequence[TargetItem]) -> None:
        with self._wake:
            self.submits.append(list(items))
            self._inbox += [(session, item) for item in items]
            self._wake.notify()

    def detach(self, session: int) -> None:
        with self._wake:
            self.sessions.pop(session)
            self.detached.append(session)
            self._open = {name: owner for name, owner in self._open.items() if owner != session}

    def drain(self) -> None:
        self.draining = True

    def load(self) -> Load:
        with self._wake:
            self._counters.sequences = len(self._open)
            return self._counters

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._stopping)
                if not self._inbox:
                    return
            self.gate.wait()
            with self._wake:
                inbox, self._inbox = self._inbox, []
                outgoing: dict[int, list[TargetResult]] = defaultdict(list)
                for session, item in inbox:
                    outgoing[session] += self._answer(session, item)
                self._counters.steps += 1
                delivers = [(self.sessions.get(session), results) for session, results in outgoing.items()]
            for deliver, results in delivers:
                if deliver is not None:
                    deliver(results)

    def _answer(self, session: int, item: TargetItem) -> list[TargetResult]:
        body = item.body
        if isinstance(body, TargetOpen):
            self._open[item.header.sequence_id] = session
            return [TargetResult(item.header, Opened())]
        if isinstance(body, VerifyBlock):
            token_ids = body.candidates.token_ids
            committed = Committed(token_ids, (TokenSource.ACCEPTED,) * len(token_ids), len(token_ids))
            return [TargetResult(item.header, committed)] * self.answers_per_block
        self._open.pop(item.header.sequence_id, None)
        return [TargetResult(item.header, Released())]


async def _tell(address: str) -> None:
    print(address, flush=True)


async def _main(listen: str) -> None:
    options = ServeOptions(grace=20.0, ignore_sigint=True)
    await serve_target(FakeTargetWorker(), BUNDLE, listen, on_ready=_tell, options=options)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
