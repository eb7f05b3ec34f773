"""What a deployment did lately, as the report draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import control_service_pb2 as pb
from outrider.v1.types_pb2 import TokenSource

SHOWN_SEQUENCES = 12
SHOWN_STEPS = 400
"""Of a sequence, the latest."""
WIDTH = 1000.0
TOKEN_NAMES = {
    TokenSource.TOKEN_SOURCE_ACCEPTED: "accepted",
    TokenSource.TOKEN_SOURCE_CORRECTION: "correction",
    TokenSource.TOKEN_SOURCE_BONUS: "bonus",
    TokenSource.TOKEN_SOURCE_PLAIN: "plain",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """kind: draft, ahead, stale, verify or plainstep. x, width: where WIDTH is the whole chart. title: on hover."""

    kind: str
    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One sequence. seconds: what the width stands for. tokens: how many of each source."""

    name: str
    seconds: float
    bars: tuple[Bar, ...]
    tokens: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sequence: pb.SequenceRounds) -> Chart:
        entries = [entry for entry in sequence.entries if entry.HasField("step") or entry.HasField("stale")]
        entries = entries[-SHOWN_STEPS:]
        begin = min((_began(entry) for entry in entries), default=0.0)
        seconds = max((entry.at for entry in entries), default=begin) - begin
        scale = WIDTH / max(seconds, 1e-6)
        bars = [bar for entry in entries for bar in _bars(entry, begin, scale)]
        sources = [source for entry in entries for source in entry.step.sources]
        counts = [(name, sources.count(source)) for source, name in TOKEN_NAMES.items()]
        request = f", request {sequence.request_id}" if sequence.request_id else ""
        name = f"sequence {sequence.sequence_id}{request}, {sequence.prompt_tokens} prompt tokens"
        return cls(name, seconds, tuple(bars), tuple((name, count) for name, count in counts if count))


@dataclass(frozen=True, slots=True)
class Span:
    """figures: name and text, those that are known. acceptance: percent by position."""

    figures: tuple[tuple[str, str], ...]
    acceptance: tuple[float, ...]
    reason: str
    charts: tuple[Chart, ...]
    left_out: int
    workers: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls, status: pb.GetStatusResponse, figures: pb.GetFiguresResponse, sequences: Sequence[pb.SequenceRounds]
    ) -> Span:
        shown = sequences[-SHOWN_SEQUENCES:]
        return cls(
            tuple(_figures(figures)),
            tuple(100 * rate for rate in figures.acceptance_per_position),
            f"{figures.mode}: {figures.reason}",
            tuple(Chart.of(sequence) for sequence in shown),
            len(sequences) - len(shown),
            tuple(_worker(worker) for worker in status.workers),
        )


def _figures(figures: pb.GetFiguresResponse) -> list[tuple[str, str]]:
    rows = [(f"tokens per second, over {figures.seconds} s", f"{figures.tokens_per_second:.1f}")]
    known = (
        ("tokens_per_verify", "tokens per verify", ".2f"),
        ("acceptance_rate", "acceptance rate", ".0%"),
        ("speculative_rate", "tokens per second of one sequence, speculating", ".1f"),
        ("plain_rate", "tokens per second of one sequence, plain", ".1f"),
    )
    rows += [(text, format(getattr(figures, name), form)) for name, text, form in known if figures.HasField(name)]  # type: ignore[arg-type]
    if figures.HasField("speculative_rate") and figures.HasField("plain_rate"):
        rows.append(("speculating against plain", f"{figures.speculative_rate / figures.plain_rate:.2f} x"))
    counts = f"{figures.rounds}, {figures.plain_steps}, {figures.ahead_rounds}, {figures.stale_blocks}"
    return [*rows, ("rounds, plain steps, ahead hits, stale blocks", counts)]


def _worker(worker: pb.WorkerStatus) -> tuple[str, ...]:
    load, identity = worker.load, worker.identity
    kv = f"{load.kv_blocks_used / load.kv_blocks_total:.0%}" if load.kv_blocks_total else "-"
    state = pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
    model = identity.model_name or identity.drafter
    return identity.worker_id or worker.address, model, state, str(load.sequences), kv, str(load.tokens)


def _began(entry: pb.SequenceEntry) -> float:
    draft = entry.step.draft if entry.HasField("step") else entry.stale.draft
    return min(entry.at - entry.step.step_time, draft.arrived_at - draft.draft_time) if draft.draft_worker else entry.at


def _bars(entry: pb.SequenceEntry, begin: float, scale: float) -> list[Bar]:
    def bar(kind: str, start: float, end: float, title: str) -> Bar:
        return Bar(kind, max(start - begin, 0) * scale, max((end - start) * scale, 0.6), title)

    bars = []
    is_step = entry.HasField("step")
    draft = entry.step.draft if is_step else entry.stale.draft
    if draft.draft_worker:
        kind = "stale" if not is_step else "ahead" if draft.ahead else "draft"
        title = f"{draft.num_candidates} candidates in {draft.draft_time * 1e3:.1f} ms"
        bars.append(bar(kind, draft.arrived_at - draft.draft_time, draft.arrived_at, title))
    if is_step:
        step = entry.step
        title = f"step {step.number}: {len(step.sources)} tokens in {step.step_time * 1e3:.1f} ms"
        kind = "verify" if step.num_draft_tokens else "plainstep"
        bars.append(bar(kind, max(entry.at - step.step_time, step.began_at), entry.at, title))
    return bars
