"""`outrider generate`: asks a running deployment for text and shows how it came about."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from services.cli.answer import Answer, AnswerView
from services.cli.connection import DEFAULT_ADDRESS, AddressOption, ApiKeyOption, Connection, TlsCaOption, ask
from services.cli.question import Question
from services.start_error import ExitCode, StartError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Mode(StrEnum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: AddressOption = DEFAULT_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    model: Annotated[str, typer.Option(help="Name of a served model; none: the only one.")] = "",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Use the model's chat template, or continue the text as it is; none: chat "
            "where the model has a template.",
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens at most; none: what is left of the context.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; none: 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens; 0: off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this mass; 1: off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least probability, relative to the likeliest; 0: off.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same answer; none: a random one, told at the end.")
    ] = None,
    speculation: Annotated[Mode, typer.Option(help="auto where it pays, on always, off never.")] = Mode.AUTO,
    draft_length: Annotated[int | None, typer.Option(help="Candidates per round; none: the deployment's.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that the answer may take; none: no limit.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also run plain, and print the speed ratio.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: text, token ids, figures.")] = False,
) -> None:
    """Stream an answer. Text goes to standard output, all else to standard error."""
    question = Question(
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        model=model,
        chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        speculation=speculation.value,
        draft_length=draft_length,
        timeout=timeout,
    )
    question.check()
    connection = Connection(address, api_key, tls_ca)
    asyncio.run(_compared(connection, question, as_json) if compare else _single(connection, question, as_json))


async def _single(connection: Connection, question: Question, as_json: bool) -> None:
    answer = await _shown(connection, question, as_json)
    if as_json:
        print(json.dumps(answer.as_dict()))


async def _shown(connection: Connection, question: Question, quiet: bool) -> Answer:
    """Streams the answer to stdout, and its figures to stderr, unless `quiet`."""
    view = AnswerView()
    if not quiet and (legend := view.legend()):
        print(legend, file=sys.stderr)
    try:
        answer = await ask(connection, question, None if quiet else view.write)
    finally:
        view.end_line()
    if not quiet and answer.figures is not None:
        print(f"{answer.figures.line()}, seed {answer.seed}", file=sys.stderr)
    return answer


async def _compared(connection: Connection, question: Question, as_json: bool) -> None:
    """Speculative, then plain with the same seed: the text is the same, the speed is not."""
    if not as_json:
        print("with speculation:", file=sys.stderr)
    fast = await _shown(connection, question, as_json)
    if not as_json:
        print("plain:", file=sys.stderr)
    plain = await _shown(connection, question.plain(fast.seed), as_json)
    if fast.figures is None or plain.figures is None:
        raise StartError("an answer ended without figures", ExitCode.FAILED)
    ratio = fast.figures.tokens_per_second / plain.figures.tokens_per_second
    same = fast.token_ids == plain.token_ids
    if as_json:
        print(json.dumps({**fast.as_dict(), "plain": plain.as_dict(), "speed_ratio": ratio, "same_tokens": same}))
        return
    words = "the same tokens" if same else "DIFFERENT tokens"
    print(f"{ratio:.2f} x the speed of plain decoding, {words}", file=sys.stderr)
