"""`outrider demo`: starts everything, streams one answer, shows the figures, ends. With `--keep` it goes on asking."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli.answer import Answer, AnswerView
from services.cli.connection import Connection, ask
from services.cli.flags import CONFIG_HELP, Flags
from services.cli.question import Question
from services.cli.up import start
from services.settings import SettingsError
from services.start_error import ExitCode, StartError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PARAGRAPH = (
    "The outrider left the camp before dawn and followed the river to the north. At the second bridge he met a "
    "merchant who had lost his horses in the storm. The outrider gave the merchant bread and water, and told him "
    "that the caravan would reach the second bridge before noon."
)


class PairName(StrEnum):
    SMOLLM2 = "smollm2"
    QWEN_CODER = "qwen-coder"


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with a drafter, and a prompt that shows what the pair is good at."""

    flags: Flags
    prompt: str
    why: str
    next_step: str
    max_tokens: int


PAIRS = {
    PairName.SMOLLM2: Pair(
        flags={"model": "smollm2-135m", "drafter": "ngram"},
        prompt=f"Copy this text, but write 'rider' instead of 'outrider':\n\n{PARAGRAPH}",
        why="chosen because this drafter copies: `ngram` proposes what followed the same words before",
        next_step="next: make run PAIR=qwen-coder (1.6 GB to download, 5 GB on disk, two real models)",
        max_tokens=96,
    ),
    PairName.QWEN_CODER: Pair(
        flags={"model": "qwen2.5-coder-1.5b", "draft_model": "qwen2.5-coder-0.5b"},
        prompt="Write a Python function `merge(first, second)` that merges two sorted lists into one sorted list.",
        why="chosen because a small code model foresees most of what a larger one writes",
        next_step="next: make demo PAIR=qwen-coder, or `outrider up` and `outrider generate` in a second terminal",
        max_tokens=128,
    ),
}


@app.command()
def demo(
    pair: Annotated[PairName, typer.Option(help="Which models to show.")] = PairName.SMOLLM2,
    keep: Annotated[bool, typer.Option("--keep", help="Ask for further prompts until Ctrl-D.")] = False,
    config: Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP, metavar="FILE")] = None,
) -> None:
    """Start everything on free ports, stream one answer, show the figures, end everything."""
    chosen = PAIRS[pair]
    flags: Flags = {**chosen.flags, "grpc_port": "0", "http_port": "0", "log_level": "error"}
    session = Demonstration(chosen, keep)
    try:
        code = start(config, flags, session.run)
    except SettingsError as error:
        raise StartError(str(error), ExitCode.WRONG_USE) from error
    if code == ExitCode.OK:
        print(chosen.next_step, file=sys.stderr)
    raise typer.Exit(code)


class Demonstration:
    """What is shown of a deployment while it runs."""

    def __init__(self, pair: Pair, keep: bool) -> None:
        self._pair = pair
        self._keep = keep

    async def run(self, address: str) -> None:
        """One answer, and with `keep` more of them until the input ends."""
        connection = Connection(address)
        say(f"\nprompt ({self._pair.why}):\n\n{self._pair.prompt}\n")
        await show(connection, self._question(self._pair.prompt, temperature=0.0))
        while self._keep and (prompt := await read_line("\nprompt (Ctrl-D ends): ")) is not None:
            if prompt.strip():
                try:
                    await show(connection, self._question(prompt, temperature=0.7))
                except StartError as error:
                    say(f"error: {error}")

    def _question(self, prompt: str, temperature: float) -> Question:
        return Question(prompt=prompt, max_tokens=self._pair.max_tokens, temperature=temperature)


async def show(connection: Connection, question: Question) -> Answer:
    """Streams one answer with its legend and figures."""
    view = AnswerView()
    if legend := view.legend():
        say(legend + "\n")
    try:
        answer = await ask(connection, question, view.write)
    finally:
        view.end_line()
    if answer.figures is not None:
        say(f"\n{answer.figures.line()}")
    return answer


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def read_line(prompt: str) -> str | None:
    """A line from standard input, None at its end. Reads in a daemon thread, so that Ctrl-C need not wait for it."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def settle(text: str) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        text = sys.stdin.readline()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, text)

    print(prompt, end="", file=sys.stderr, flush=True)
    threading.Thread(target=read, daemon=True).start()
    text = await line
    if not text:
        say("")
        return None
    return text
