"""The journal of one sequence: what happened to it, entry by entry, told to whoever reads along."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from scheduler.entries import Admitted, Draft, Dropped, Ended, Entry, FellBack, Placed, Reader, Step
from scheduler.request import GenerationRequest, SpeculationSummary
from scheduler.worker import Worker
from specdec.commit import FinishReason
from specdec.goodput import Explained
from specdec.log import Log
from specdec.messages import Committed, DraftBlock, Header

_BLOCKS_UNDER_WAY = 16


class Journal:
    """Costs next to nothing while nobody reads. Times are monotonic seconds."""

    def __init__(self, sequence_id: str, readers: Sequence[Reader]) -> None:
        self._sequence_id = sequence_id
        self._readers = readers
        self._steps = 0
        self._last_at = 0.0
        self._epoch = 0
        self._target = ""
        self._asked_at: float | None = None
        self._drafts: deque[tuple[bytes, Draft]] = deque(maxlen=_BLOCKS_UNDER_WAY)
        """With the digest of its base: several may be drafted for one length, for different outcomes."""

    def admitted(self, request: GenerationRequest) -> None:
        self._tell(
            Admitted(
                self._sequence_id,
                time.monotonic(),
                request.model,
                len(request.token_ids),
                request.request_id,
                request.traceparent,
                request.tracestate,
            )
        )

    def placed(self, epoch: int, target: Worker, drafter: Worker | None, length: int, cause: str) -> None:
        self._epoch, self._target = epoch, target.name
        self._asked_at = None
        self._drafts.clear()
        self._last_at = time.monotonic()
        self._tell(Placed(self._sequence_id, self._last_at, epoch, length, target.name, _name(drafter), cause))

    def asked(self, now: float) -> None:
        """The drafter was told to draft."""
        self._asked_at = now

    def forwarded(self, base: Header, block: DraftBlock, drafter: Worker | None, ahead: bool, now: float) -> None:
        """A block went on to the target."""
        if not self._readers:
            return
        asked_at = None if ahead else self._asked_at
        draft = Draft(base.base_length, block.candidates, _name(drafter), asked_at, now, block.draft_time, ahead)
        self._drafts.append((base.prefix_digest, draft))

    def committed(
        self, body: Committed, log: Log, position: int, decision: Explained | None, arrived_at: float
    ) -> None:
        """The target's step decided these last tokens of `log`."""
        if not self._readers:
            return
        base_length = len(log) - len(body.token_ids)
        now = time.monotonic()
        draft = self._verified(log, base_length) if body.num_draft_tokens else None
        began_at = max(self._last_at, draft.arrived_at) if draft else self._last_at
        self._steps += 1
        self._last_at = now
        self._tell(
            Step(
                self._sequence_id,
                now,
                self._epoch,
                self._steps,
                position,
                body.token_ids,
                body.sources,
                began_at,
                arrived_at,
                body.step_time,
                body.batch_size,
                body.num_draft_tokens,
                self._target,
                draft,
                decision,
            )
        )

    def stale(self, prefix_digest: bytes | None = None) -> None:
        """prefix_digest: of the block that the target found stale; None: it was not forwarded at all."""
        found = next((entry for entry in self._drafts if entry[0] == prefix_digest), None)
        if found is not None:
            self._drafts.remove(found)
        self._tell(Dropped(self._sequence_id, time.monotonic(), found[1] if found else None))

    def fell_back(self, reason: str) -> None:
        self._tell(FellBack(self._sequence_id, time.monotonic(), reason))

    def ended(
        self,
        completion_tokens: int,
        finish_reason: FinishReason | None,
        speculation: SpeculationSummary,
        error: BaseException | None,
    ) -> None:
        """error: what ended it, if it was not finished."""
        kind = message = ""
        if finish_reason is None and error is not None:
            cancelled = isinstance(error, (GeneratorExit, asyncio.CancelledError))
            kind, message = ("cancelled", "") if cancelled else (type(error).__name__, str(error))
        now = time.monotonic()
        self._tell(Ended(self._sequence_id, now, completion_tokens, finish_reason, speculation, kind, message))

    def _verified(self, log: Log, base_length: int) -> Draft | None:
        """The block whose candidates were verified on top of `base_length`: the youngest on the log that reaches over
        it. Others, drafted ahead and not yet known to be stale, may lie on both sides of it."""
        for entry in reversed(self._drafts):
            prefix_digest, draft = entry
            reaches = draft.base_length <= base_length < draft.base_length + len(draft.candidates)
            if reaches and log.digest_at(draft.base_length) == prefix_digest:
                self._drafts.remove(entry)
                return draft
        return None

    def _tell(self, entry: Entry) -> None:
        for reader in self._readers:
            reader(entry)


def _name(worker: Worker | None) -> str:
    return worker.name if worker else ""
