"""What a peer's process and a benchmark say to each other: one JSON object a line. Only the standard library, since a
peer's own environment imports it.

asked: {"prompts": [[token id, ...], ...], "tokens": n, "temperature": t, "top_p": p, "seed": s}
told: {"ready": version} once, then for each question {"token_ids": [[...], ...], "seconds": s}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Generate = Callable[[Sequence[Sequence[int]], dict[str, Any]], list[list[int]]]


def claim_output() -> Any:
    """The standard output for answers alone: whatever a library prints goes to the standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(generate: Generate, version: str, answers: Any) -> None:
    """Until the standard input ends."""
    answers.write(json.dumps({"ready": version}) + "\n")
    answers.flush()
    for line in sys.stdin:
        question = json.loads(line)
        started = time.perf_counter()
        token_ids = generate(question["prompts"], question)
        seconds = time.perf_counter() - started
        answers.write(json.dumps({"token_ids": token_ids, "seconds": seconds}) + "\n")
        answers.flush()
