"""`outrider generate`: asks a running deployment for text and shows how it came about."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import interruptible
from services.cli.answer import Answer, AnswerView
from services.cli.connection import DEFAULT_ADDRESS, AddressOption, ApiKeyOption, Connection, TlsCaOption, ask_all
from services.cli.question import Question, read_biases, read_file
from services.start_error import ExitCode, StartError
from services.telemetry.tracing_client import client_tracing

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SAMPLING = "How tokens are drawn"
END = "Where the answer ends"
SHOWN = "What is shown"
MATCH = "What the answer must match (at most one)"
SPECULATION = "Speculation"


class Mode(StrEnum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Rule(StrEnum):
    INVARIANT = "invariant"
    REJECTION = "rejection"
    BLOCK = "block"


class Law(StrEnum):
    RAW = "raw"
    PROCESSED = "processed"


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


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
    timeout: Annotated[float | None, typer.Option(help="Seconds that the answer may take; none: no limit.")] = None,
    n: Annotated[int | None, typer.Option(help="Choices, each with its own seed; none: 1.")] = None,
    temperature: Annotated[float | None, _option(SAMPLING, "0 is greedy; none: 1.")] = None,
    top_k: Annotated[int | None, _option(SAMPLING, "Draw from the k likeliest tokens; 0: off.")] = None,
    top_p: Annotated[float | None, _option(SAMPLING, "Draw from the likeliest tokens of this mass; 1: off.")] = None,
    min_p: Annotated[float | None, _option(SAMPLING, "Least probability, relative to the likeliest; 0: off.")] = None,
    typical_p: Annotated[
        float | None, _option(SAMPLING, "Draw from the most typical tokens of this mass; 1: off.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, _option(SAMPLING, "Divides the logits of tokens of prompt and answer; 1: off.")
    ] = None,
    presence_penalty: Annotated[
        float | None, _option(SAMPLING, "Taken from the logits of tokens of the answer; 0: off.")
    ] = None,
    frequency_penalty: Annotated[float | None, _option(SAMPLING, "The same, once for each time; 0: off.")] = None,
    logit_bias: Annotated[
        list[str] | None, _option(SAMPLING, "ID=BIAS, added to that token's logit; may be repeated.")
    ] = None,
    bad_word: Annotated[
        list[str] | None, _option(SAMPLING, "Text that the answer must not hold; may be repeated.")
    ] = None,
    allowed_token_id: Annotated[list[int] | None, _option(SAMPLING, "Draw only such tokens; may be repeated.")] = None,
    seed: Annotated[
        int | None, _option(SAMPLING, "Same seed, same answer; none: a random one, told at the end.")
    ] = None,
    max_tokens: Annotated[int | None, _option(END, "Tokens at most; none: what is left of the context.")] = None,
    min_tokens: Annotated[int | None, _option(END, "No stop before so many tokens.")] = None,
    stop: Annotated[list[str] | None, _option(END, "End before this text; may be repeated.")] = None,
    include_stop: Annotated[bool, _option(END, "Show the stop text too.", "--include-stop")] = False,
    stop_token_id: Annotated[list[int] | None, _option(END, "End at this token; may be repeated.")] = None,
    ignore_eos: Annotated[bool, _option(END, "Go on after the model's own stop tokens.", "--ignore-eos")] = False,
    json_schema: Annotated[Path | None, _option(MATCH, "File with a JSON schema.")] = None,
    json_object: Annotated[bool, _option(MATCH, "Any JSON object.", "--json-object")] = False,
    regex: Annotated[str | None, _option(MATCH, "Regular expression for the whole answer.")] = None,
    choice: Annotated[list[str] | None, _option(MATCH, "One of these texts; to be repeated.")] = None,
    grammar: Annotated[Path | None, _option(MATCH, "File with a grammar in llguidance's Lark dialect.")] = None,
    speculation: Annotated[Mode, _option(SPECULATION, "auto where it pays, on always, off never.")] = Mode.AUTO,
    draft_length: Annotated[int | None, _option(SPECULATION, "Candidates per round; none: the deployment's.")] = None,
    accept_rule: Annotated[
        Rule | None, _option(SPECULATION, "Which candidates are accepted; none: the deployment's.")
    ] = None,
    logprobs: Annotated[
        int | None, _option(SHOWN, "Log probability of each token, and the K likeliest; 0: its own only.")
    ] = None,
    logprobs_of: Annotated[
        Law, _option(SHOWN, "raw: the model's softmax; processed: the law that was drawn from.")
    ] = Law.RAW,
    echo: Annotated[bool, _option(SHOWN, "Begin with the prompt, which is not put in a template.", "--echo")] = False,
    compare: Annotated[bool, _option(SHOWN, "Also run plain, and print the speed ratio.", "--compare")] = False,
    as_json: Annotated[bool, _option(SHOWN, "Print one JSON object: text, token ids, figures.", "--json")] = False,
) -> None:
    """Stream an answer. Text goes to standard output, all else to standard error."""
    question = Question(
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        model=model,
        chat=False if echo and chat is None else chat,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=read_biases(logit_bias or ()),
        bad_words=tuple(bad_word or ()),
        allowed_token_ids=tuple(allowed_token_id or ()),
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
        include_stop_str_in_output=include_stop,
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        top_logprobs=logprobs,
        logprobs_of=logprobs_of.value,
        echo=echo,
        accept_rule=accept_rule.value if accept_rule else None,
        json_schema=read_file("json_schema", json_schema),
        json_object=json_object,
        regex=regex,
        choice=tuple(choice or ()),
        lark=read_file("grammar", grammar),
        speculation=speculation.value,
        draft_length=draft_length,
        timeout=timeout,
    )
    question.check(compare)
    connection = Connection(address, api_key, tls_ca)
    answered = _compared if compare else _single
    with client_tracing():
        interruptible.run(answered(connection, question, as_json))


async def _single(connection: Connection, question: Question, as_json: bool) -> None:
    answers = await _shown(connection, question, as_json)
    if as_json:
        first, *others = [answer.as_dict() for answer in answers]
        print(json.dumps({"choices": [first, *others]} if others else first))


async def _shown(connection: Connection, question: Question, quiet: bool) -> list[Answer]:
    """Streams the answer to stdout, and its figures to stderr, unless `quiet`. Several choices are shown one after the
    other, once all are there."""
    view = AnswerView()
    streaming = not quiet and question.choices == 1
    if not quiet and (legend := view.legend()):
        print(legend, file=sys.stderr)
    try:
        answers = await ask_all(connection, question, view.write if streaming else None)
    finally:
        view.end_line()
    for answer in [] if quiet else answers:
        if not streaming:
            print(f"choice {answer.index}:", file=sys.stderr)
            view.write(answer.pieces)
            view.end_line()
        for line in answer.notes():
            print(line, file=sys.stderr)
    return answers


async def _compared(connection: Connection, question: Question, as_json: bool) -> None:
    """Speculative, then plain with the same seed: the text is the same, the speed is not."""
    if not as_json:
        print("with speculation:", file=sys.stderr)
    (fast,) = await _shown(connection, question, as_json)
    if not as_json:
        print("plain:", file=sys.stderr)
    (plain,) = await _shown(connection, question.plain(fast.seed), as_json)
    if fast.figures is None or plain.figures is None:
        raise StartError("an answer ended without figures", ExitCode.FAILED)
    ratio = fast.figures.tokens_per_second / plain.figures.tokens_per_second
    same = fast.token_ids == plain.token_ids
    if as_json:
        print(json.dumps({**fast.as_dict(), "plain": plain.as_dict(), "speed_ratio": ratio, "same_tokens": same}))
        return
    words = "the same tokens" if same else "DIFFERENT tokens"
    print(f"{ratio:.2f} x the speed of plain decoding, {words}", file=sys.stderr)
