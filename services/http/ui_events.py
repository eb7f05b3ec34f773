"""What the page is told without asking: what happens to sequences, and how the deployment does. Counts and times only:
what was written is told to who asked for it, and to nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from outrider.version import __version__
from scheduler.entries import Admitted, Draft, Dropped, Ended, Entry, FellBack, Placed, Step
from scheduler.scheduler import WorkerView
from services.control_servicer import ReportedScheduler
from services.http.token_text import Json
from services.rounds import RoundStore
from services.rounds_figures import Figures
from services.rounds_text import fallback_text, reason_text

TICK_SECONDS = 0.1
STATUS_SECONDS = 1.0
RECENT_SECONDS = 30.0
"""How much of the past a page begins with."""
MAX_ENTRIES = 400
"""Of one message; of more than that the oldest are left out."""

Leases = Callable[[], Awaitable[dict[str, float]]]


class StatusBoard:
    """How the deployment does, asked once a second however many pages look."""

    def __init__(self, scheduler: ReportedScheduler, rounds: RoundStore, leases: Leases | None = None) -> None:
        self._scheduler = scheduler
        self._rounds = rounds
        self._leases = leases
        self._asking = asyncio.Lock()
        self._asked_at = -STATUS_SECONDS
        self._workers: list[Json] = []

    async def status(self) -> Json:
        figures = self._rounds.figures
        return {
            "type": "status",
            "now": time.monotonic(),
            "version": __version__,
            "ready": self._scheduler.ready,
            "active": self._scheduler.active_sequences(),
            "workers": await self._current_workers(),
            "figures": figures_json(figures.figures()),
            "by_second": figures.by_second(),
        }

    async def _current_workers(self) -> list[Json]:
        async with self._asking:
            if time.monotonic() - self._asked_at >= STATUS_SECONDS:
                leases = await self._leases() if self._leases is not None else {}
                views = await self._scheduler.workers()
                self._workers = [_worker(view, leases.get(view.address)) for view in views]
                self._asked_at = time.monotonic()
            return self._workers


async def live(board: StatusBoard, rounds: RoundStore) -> AsyncGenerator[Json, None]:
    """`status` once a second and `entries` as they come, for as long as there are any to come."""
    with rounds.feed() as feed:
        known = rounds.since(time.monotonic() - RECENT_SECONDS)
        recent: list[Entry] = [entry for one in known for entry in (one.admitted, *one.entries)]
        recent.sort(key=lambda entry: entry.at)
        yield await board.status()
        yield _entries(recent, 0)
        told_at, lost = time.monotonic(), 0
        while not feed.closed:
            entries = await feed.take(STATUS_SECONDS)
            if entries:
                yield _entries(entries, feed.lost - lost)
                lost = feed.lost
                await asyncio.sleep(TICK_SECONDS)  # what comes meanwhile shares a message
            if time.monotonic() - told_at >= STATUS_SECONDS:
                yield await board.status()
                told_at = time.monotonic()


def figures_json(figures: Figures) -> Json:
    counts = figures.counts
    return {
        "seconds": figures.seconds,
        "tokens_per_second": figures.tokens_per_second,
        "tokens_per_verify": figures.tokens_per_verify,
        "acceptance_rate": figures.acceptance_rate,
        "acceptance_per_position": figures.acceptance_per_position,
        "speculative_rate": figures.speculative_rate,
        "plain_rate": figures.plain_rate,
        "expected_rate": figures.expected_rate,
        "expected_plain_rate": figures.expected_plain_rate,
        "mode": figures.mode,
        "reason": figures.reason,
        "rounds": counts.rounds,
        "plain_steps": counts.plain_steps,
        "ahead_rounds": counts.ahead_rounds,
        "stale_blocks": counts.stale_blocks,
        "fallbacks": dict(counts.fallbacks),
    }


def _entries(entries: list[Entry], lost: int) -> Json:
    shown = entries[-MAX_ENTRIES:]
    return {
        "type": "entries",
        "now": time.monotonic(),
        "lost": lost + len(entries) - len(shown),
        "entries": [entry_json(entry) for entry in shown],
    }


def entry_json(entry: Entry) -> Json:
    """Times are in seconds of the scheduler's monotonic clock."""
    content: Json = {"sequence": entry.sequence_id, "at": entry.at}
    match entry:
        case Admitted():
            content |= {"kind": "admitted", "model": entry.model, "prompt_tokens": entry.prompt_tokens}
        case Placed():
            content |= {"kind": "placed", "target": entry.target_worker, "drafter": entry.draft_worker}
            content["cause"] = entry.cause
        case Step():
            content |= _step(entry)
        case Dropped(draft=draft):
            content |= {"kind": "stale", "draft": _draft(draft) if draft else None}
        case FellBack(reason=reason):
            content |= {"kind": "fell_back", "reason": fallback_text(reason)}
        case Ended():
            content |= {"kind": "ended", "tokens": entry.completion_tokens, "error": entry.error}
            content["mode"] = entry.speculation.mode
    return content


def _step(step: Step) -> Json:
    return {
        "kind": "step",
        "number": step.number,
        "sources": [source.value for source in step.sources],
        "began_at": step.began_at,
        "step_time": step.step_time,
        "batch": step.batch_size,
        "drafted": step.num_draft_tokens,
        "accepted": step.accepted,
        "draft": _draft(step.draft) if step.draft else None,
        "reason": reason_text(step.decision) if step.decision else None,
    }


def _draft(draft: Draft) -> Json:
    return {
        "candidates": len(draft.candidates),
        "worker": draft.draft_worker,
        "asked_at": draft.asked_at,
        "arrived_at": draft.arrived_at,
        "draft_time": draft.draft_time,
        "ahead": draft.ahead,
    }


def _worker(view: WorkerView, lease: float | None) -> Json:
    identity, load = view.identity, view.load
    content: Json = {"address": view.address, "role": view.role.value, "state": view.state, "detail": view.detail}
    if identity is not None:
        content |= {"name": identity.worker_id, "model": identity.model_name or identity.drafter}
        content |= {"device": identity.device, "dtype": identity.dtype}
    if load is not None:
        content |= {"sequences": load.sequences, "kv_used": load.kv_blocks_used, "kv_total": load.kv_blocks_total}
        content |= {"steps": load.steps, "tokens": load.tokens}
    return content | {"lease": lease}
