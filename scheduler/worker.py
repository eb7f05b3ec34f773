"""A worker as the scheduler holds it: its link, what it said of itself, and whether it can be used now."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from scheduler.config import SchedulerConfig
from scheduler.links import AnyLink
from specdec.costs import DrafterModel, TargetModel
from specdec.messages import DraftItem, DraftResult, Identity, Role, TargetItem, TargetResult

_log = logging.getLogger(__name__)

AnyItem = TargetItem | DraftItem
AnyResult = TargetResult | DraftResult


class WorkerState(Enum):
    CONNECTING = "connecting"
    """Being reached, or asked who it is."""
    READY = "ready"
    REFUSED = "refused"
    """Does not fit; the detail says why."""
    SUSPENDED = "suspended"
    """Failed lately; left alone for a while, then probed."""
    LOST = "lost"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Worker:
    """sequences: ids placed here. candidate_time: running mean of how long a draft takes per candidate of its length,
    seconds. target_model, drafter_model: what its work costs, for the goodput policy. broken: told why its stream has
    ended, or is to end. Times are monotonic."""

    role: Role
    address: str
    link: AnyLink
    state: WorkerState = WorkerState.CONNECTING
    detail: str = ""
    identity: Identity | None = None
    sequences: set[str] = field(default_factory=set)
    candidate_time: float | None = None
    suspended_until: float = 0.0
    removed: bool = False
    broken: asyncio.Future[str] | None = None
    failures: deque[float] = field(default_factory=deque)
    target_model: TargetModel = field(default_factory=TargetModel)
    drafter_model: DrafterModel = field(default_factory=DrafterModel)

    @property
    def name(self) -> str:
        return self.identity.worker_id if self.identity else self.address

    @property
    def drafter_label(self) -> str:
        """What metrics call it."""
        return self.identity.drafter_label if self.identity else "unnamed"

    def available(self, now: float) -> bool:
        """New work may be sent."""
        return self.state is WorkerState.READY and now >= self.suspended_until

    def takes_turns_with(self, other: Worker) -> bool:
        """They never work at the same time."""
        return bool(self.turns) and self.turns == other.turns

    @property
    def turns(self) -> str:
        """What it takes turns for; empty: nothing."""
        return self.identity.turns if self.identity else ""

    def shown_state(self, now: float) -> WorkerState:
        if self.state is WorkerState.READY and now < self.suspended_until:
            return WorkerState.SUSPENDED
        return self.state

    def send(self, item: AnyItem) -> None:
        if self.state in (WorkerState.READY, WorkerState.DRAINING):
            self.link.send([item])  # type: ignore[list-item]  # an item of the link's own role

    def blame(self, reason: str, now: float, config: SchedulerConfig) -> None:
        """A draft failed or was late; after so many of them within the window the worker is left alone for a while."""
        self.failures.append(now)
        while self.failures and self.failures[0] < now - config.failure_window:
            self.failures.popleft()
        if len(self.failures) < config.suspend_after_failures or now < self.suspended_until:
            return
        self.suspended_until = now + config.suspend_time
        self.detail = f"left alone for {config.suspend_time:g} s: its drafts were {reason}"
        _log.warning("draft worker %s is %s", self.name, self.detail)

    def record_draft(self, seconds: float, draft_length: int) -> None:
        """A block of `draft_length` candidates on its longest path took `seconds`, link included. That may be fewer
        than were asked for: the next one, of which the drafter is sure, takes longer."""
        time = seconds / max(draft_length, 1)
        self.candidate_time = time if self.candidate_time is None else 0.8 * self.candidate_time + 0.2 * time
