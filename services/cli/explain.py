"""`outrider explain`: of each round of a request, what was decided and from what."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from outrider.v1 import control_service_pb2 as pb
from outrider.v1.types_pb2 import TokenSource
from services.cli import interruptible
from services.cli.connection import DEFAULT_ADDRESS, AddressOption, ApiKeyOption, Connection, TlsCaOption
from services.cli.control import REQUEST_HELP, control
from services.cli.tables import new_table, print_tables
from services.rounds_text import NO_REASONS, decision_text, fallback_text
from specdec.decision import Decision

SHOWN_DEPTHS = 4
_ALWAYS = ("#", "at", "step", "tokens", "accepted", "verify")
_INPUTS = ("acceptance by depth", "T verify", "T draft", "link", "ahead", "others")
_REASONS = ("chosen", "expected", "plain", *_INPUTS, "why")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help=REQUEST_HELP)],
    address: AddressOption = DEFAULT_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show each step of a request, and the decision that stood behind it with all it was made from.

    Times are in milliseconds, rates in tokens per second.
    """
    found = interruptible.run(_ask(Connection(address, api_key, tls_ca), request))
    if as_json:
        print(json.dumps({"sequences": [as_dict(sequence) for sequence in found]}))
        return
    for sequence in found:
        print_tables(table_of(sequence))
        for line in notes_of(sequence):
            print(line, file=sys.stderr)


async def _ask(connection: Connection, request: str) -> list[pb.SequenceRounds]:
    async with control(connection) as asked:
        return await asked.rounds(request)


def as_dict(sequence: pb.SequenceRounds) -> dict[str, object]:
    """Fields as in the proto."""
    content: dict[str, object] = MessageToDict(
        sequence, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return content


def table_of(sequence: pb.SequenceRounds) -> Table:
    """One row per step; what was decided from only if the policy tells."""
    has_reasons = any(entry.step.HasField("decision") for entry in sequence.entries)
    title = f"sequence {sequence.sequence_id}, {sequence.model}, {sequence.prompt_tokens} prompt tokens"
    table = new_table(_ALWAYS + (_REASONS if has_reasons else ()), title)
    for entry in sequence.entries:
        row = _row(entry)
        if row:
            table.add_row(*row, *(_reasons(entry) if has_reasons else ()))
    return table


def notes_of(sequence: pb.SequenceRounds) -> list[str]:
    """What the table does not say."""
    steps = [entry.step for entry in sequence.entries if entry.HasField("step")]
    notes = []
    if sequence.forgotten:
        notes.append(f"the oldest {sequence.forgotten} entries are no longer remembered")
    drafters = [entry.placed.draft_worker for entry in sequence.entries if entry.HasField("placed")]
    if drafters and not any(drafters):
        notes.append("no drafter took part: the request asked for none, or none was live")
    elif not any(step.HasField("decision") for step in steps):
        notes.append(f"no reasons: {NO_REASONS}; `policy: goodput` of the scheduler does")
    end = next((entry.ended for entry in sequence.entries if entry.HasField("ended")), None)
    if end is None:
        notes.append("it still runs")
    elif end.error:
        notes.append(f"it ended with {end.completion_tokens} tokens: {end.error}")
    else:
        notes.append(f"it finished with {end.completion_tokens} tokens, mode {end.mode}")
    return notes


def _row(entry: pb.SequenceEntry) -> Sequence[str]:
    at = f"{entry.at * 1e3:.0f}"
    match entry.WhichOneof("entry"):
        case "step":
            step = entry.step
            accepted = sum(source == TokenSource.TOKEN_SOURCE_ACCEPTED for source in step.sources)
            drafted = step.num_draft_tokens
            kind = "plain" if not drafted else "round, ahead" if step.draft.ahead else "round"
            share = f"{accepted} of {drafted}" if drafted else "-"
            return str(step.number), at, kind, str(len(step.sources)), share, _ms(step.step_time)
        case "placed":
            placed = entry.placed
            drafter = f" with {placed.draft_worker}" if placed.draft_worker else ", no drafter"
            cause = f": {placed.cause}" if placed.cause else ""
            return "", at, f"placed on {placed.target_worker}{drafter}{cause}", "", "", ""
        case "stale":
            return "", at, "stale block", "", f"0 of {entry.stale.draft.num_candidates}", ""
        case "fell_back":
            return "", at, fallback_text(entry.fell_back.reason), "", "", ""
    return ()


def _reasons(entry: pb.SequenceEntry) -> Sequence[str]:
    """Cells of `_REASONS`."""
    if not entry.step.HasField("decision"):
        return [""] * len(_REASONS)
    reasons = entry.step.decision
    decision = Decision(reasons.draft_length, reasons.width, reasons.window, reasons.probe)
    shown = " ".join(f"{rate:.2f}" for rate in reasons.acceptance[:SHOWN_DEPTHS])
    known = reasons.goodput > 0
    return (
        decision_text(decision),
        f"{reasons.goodput:.1f}" if known else "-",
        f"{reasons.plain:.1f}" if known else "-",
        shown + (" ..." if len(reasons.acceptance) > SHOWN_DEPTHS else ""),
        f"{_ms(reasons.verify_time)} (plain {_ms(reasons.plain_time)})",
        "-" if decision.off else _ms(reasons.draft_time),
        _ms(reasons.link),
        f"{reasons.ahead:.2f}",
        f"{reasons.other_rows:.1f} rows" if reasons.other_rows else "-",
        reasons.note,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
