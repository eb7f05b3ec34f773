"""`outrider replay`: decodes an answer that the audit found wrong again, without speculation and with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import grpc
import typer

from outrider.errors import from_rpc
from services.audit_files import AuditFile, InvalidAuditFile, read
from services.channel import ChannelConfig, ClientTls, open_channel
from services.cli import interruptible
from services.cli.connection import DEFAULT_ADDRESS, AddressOption, ApiKeyOption, Connection, TlsCaOption
from services.replay import Replayed, first_difference
from services.replay import replay as run
from services.start_error import ExitCode, StartError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A file that the audit wrote into audit_dir.")],
    address: AddressOption = DEFAULT_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode an answer that the audit found wrong again. Ends with 1 if plain and speculative decoding differ now."""
    try:
        wanted = read(file)
    except InvalidAuditFile as error:
        raise StartError(str(error), ExitCode.WRONG_USE) from error
    replayed = interruptible.run(_replayed(Connection(address, api_key, tls_ca), wanted))
    print(json.dumps(_as_dict(replayed)) if as_json else "\n".join(_lines(replayed)))
    if replayed.differ_at is not None:
        raise typer.Exit(ExitCode.FAILED)


async def _replayed(connection: Connection, file: AuditFile) -> Replayed:
    """Raises StartError."""
    try:
        tls = ClientTls(connection.tls_ca) if connection.tls_ca is not None else None
        channel = open_channel(connection.address, ChannelConfig(keepalive_time=10.0, tls=tls))
    except OSError as error:
        raise StartError(f"cannot read {connection.tls_ca}: {error.strerror}", ExitCode.WRONG_USE) from error
    try:
        return await run(channel, file, connection.api_key)
    except grpc.aio.AioRpcError as error:
        raise connection.failure(from_rpc(error, connection.address)) from error
    finally:
        await channel.close(None)


def _lines(replayed: Replayed) -> list[str]:
    return [
        f"served then: {len(replayed.served)} tokens",
        f"speculation off: {_against(replayed.plain, replayed.served)}",
        f"speculation on: {_against(replayed.speculative, replayed.served)}",
        f"off and on now: {_verdict(replayed.plain, replayed.speculative)}",
    ]


def _against(answer: Sequence[int], served: Sequence[int]) -> str:
    position = first_difference(answer, served)
    same = "as it was served" if position is None else f"differs from what was served at token {position}"
    return f"{len(answer)} tokens, {same}"


def _verdict(plain: Sequence[int], speculative: Sequence[int]) -> str:
    position = first_difference(plain, speculative)
    if position is None:
        return "the same tokens"
    return f"DIFFERENT from token {position} on: {_at(plain, position)} off, {_at(speculative, position)} on"


def _at(answer: Sequence[int], position: int) -> str:
    return str(answer[position]) if position < len(answer) else "the end"


def _as_dict(replayed: Replayed) -> dict[str, object]:
    return {
        "served": replayed.served,
        "plain": replayed.plain,
        "speculative": replayed.speculative,
        "differ_at": replayed.differ_at,
    }
