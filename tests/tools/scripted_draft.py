"""The scripted draft worker as a process: `python -m tools.scripted_draft --listen unix:/path --script half:2`.

It knows what the target will say from the target's table law, or, for a real model, from plain outputs in a file:
a JSON list of [prompt ids, output ids].
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from services.worker_process import ServeOptions, serve_draft
from tools.continuations import Continuation, KnownContinuation, LawContinuation
from tools.identities import draft_identity
from tools.meddling import MEDDLES, MeddlingWorker
from tools.process import SECRET, add_common_arguments, end_with_starter, law_of, say_ready, tracing_of
from tools.scripted import Longer, NoTree, RandomTree, Script, ScriptedDrafter, Spoiled, WrongFrom, empty, oracle


def script_named(text: str, vocabulary_size: int) -> Script:
    """ "oracle", "anti", "half:POSITION", "tree:WIDTH", "empty", "longer:EXTRA", "spoiled:ID" or "notree:PARENT".

    Raises ValueError.
    """
    name, _, number = text.partition(":")
    match name:
        case "oracle":
            return oracle
        case "empty":
            return empty
        case "anti":
            return WrongFrom(0, vocabulary_size)
        case "half":
            return WrongFrom(int(number), vocabulary_size)
        case "tree":
            return RandomTree(int(number), vocabulary_size)
        case "longer":
            return Longer(int(number))
        case "spoiled":
            return Spoiled(int(number))
        case "notree":
            return NoTree(int(number))
    raise ValueError(f"no script is named {text!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    add_common_arguments(parser, "scripted")
    parser.add_argument("--script", default="oracle", help="as in script_named")
    parser.add_argument("--meddle", choices=sorted(MEDDLES), default="untouched")
    parser.add_argument("--outputs", type=Path, help="plain outputs of a real target")
    options = parser.parse_args()
    continuation: Continuation = LawContinuation(law_of(options))
    if options.outputs:
        continuation = KnownContinuation(json.loads(options.outputs.read_text()))
    script = script_named(options.script, options.vocabulary_size)
    drafter = ScriptedDrafter(script, continuation, delay=options.delay)
    end_with_starter()
    worker = DraftWorker(
        DraftConfig(options.worker_id, SECRET), drafter, draft_identity(options.worker_id, drafter="scripted")
    )
    meddling = MeddlingWorker(worker, MEDDLES[options.meddle]())
    serving = ServeOptions(grace=5.0, tracing=tracing_of(options, "draft"))
    asyncio.run(serve_draft(meddling, options.listen, on_ready=say_ready, options=serving))


if __name__ == "__main__":
    main()
