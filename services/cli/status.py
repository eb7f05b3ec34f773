"""`outrider status`: workers, leases and load of a running deployment."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from outrider.v1 import control_service_pb2 as pb
from outrider.v1.types_pb2 import WorkerRole
from services.cli import interruptible
from services.cli.connection import (
    DEFAULT_ADDRESS,
    AddressOption,
    ApiKeyOption,
    Connection,
    TlsCaOption,
)
from services.cli.control import control
from services.cli.tables import new_table, print_tables
from services.start_error import StartError

POLL_SECONDS = 0.2
SHOWN_SEQUENCES = 50

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def status(
    address: AddressOption = DEFAULT_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    wait: Annotated[
        float | None, typer.Option(help="Wait so many seconds until requests can be served.", metavar="SECONDS", min=0)
    ] = None,
) -> None:
    """Show workers, leases, load, and running sequences. Ends with 1 if requests cannot be served."""
    connection = Connection(address, api_key, tls_ca)
    answer = interruptible.run(_wait_until_ready(connection, wait) if wait is not None else _ask(connection))
    if as_json:
        print(json.dumps(as_dict(answer)))
    else:
        _print(answer)
    if not answer.ready:
        raise StartError(f"{address} cannot serve requests yet: no live target worker")


async def _ask(connection: Connection) -> pb.GetStatusResponse:
    async with control(connection) as asked:
        return await asked.status(SHOWN_SEQUENCES)


async def _wait_until_ready(connection: Connection, seconds: float) -> pb.GetStatusResponse:
    """The first status that is ready, or the last one; raises StartError if nobody answered at all."""
    give_up = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= give_up
        try:
            answer = await _ask(connection)
            if answer.ready or late:
                return answer
        except StartError:
            if late:
                raise
        await asyncio.sleep(min(POLL_SECONDS, max(give_up - time.monotonic(), 0.0)))


def as_dict(answer: pb.GetStatusResponse) -> dict[str, Any]:
    """Fields as in the proto; states and roles in the words of the table."""
    content: dict[str, Any] = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for worker, shown in zip(answer.workers, content["workers"], strict=True):
        shown["state"] = _state(worker)
        identity = shown.setdefault("identity", {})
        identity["role"] = _role(worker)
        identity.pop("vocabulary_run_digests", None)  # kilobytes that only a scheduler reads
    return content


def _print(answer: pb.GetStatusResponse) -> None:
    tables = [worker_table(answer)]
    if answer.sequences:
        tables.append(sequence_table(answer))
    print_tables(*tables)
    ready = "ready" if answer.ready else "not ready"
    seconds = answer.uptime.ToNanoseconds() / 1e9
    print(
        f"{ready}, {answer.active_sequences} active sequences, redis {answer.metadata_state}, up for {seconds:.0f} s",
        file=sys.stderr,
    )


def worker_table(answer: pb.GetStatusResponse) -> Table:
    table = new_table(
        ("worker", "role", "model", "state", "lease", "sequences", "KV", "steps", "tokens", "address", "detail")
    )
    for worker in answer.workers:
        identity, load = worker.identity, worker.load
        lease = f"{worker.lease_remaining.ToNanoseconds() / 1e9:.1f} s" if worker.HasField("lease_remaining") else "-"
        kv = f"{load.kv_blocks_used / load.kv_blocks_total:.0%}" if load.kv_blocks_total else "-"
        table.add_row(
            identity.worker_id or "-",
            _role(worker),
            identity.model_name or identity.drafter or "-",
            _state(worker),
            lease,
            str(load.sequences),
            kv,
            str(load.steps),
            str(load.tokens),
            worker.address,
            worker.detail,
        )
    return table


def sequence_table(answer: pb.GetStatusResponse) -> Table:
    table = new_table(("sequence", "epoch", "prompt", "committed", "target", "draft", "mode"))
    for sequence in answer.sequences:
        table.add_row(
            sequence.sequence_id,
            str(sequence.epoch.number),
            str(sequence.prompt_length),
            str(sequence.committed_length),
            sequence.target_worker,
            sequence.draft_worker or "-",
            sequence.mode,
        )
    return table


def _state(worker: pb.WorkerStatus) -> str:
    return pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()


def _role(worker: pb.WorkerStatus) -> str:
    return WorkerRole.Name(worker.identity.role).removeprefix("WORKER_ROLE_").lower()
