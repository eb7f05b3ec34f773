"""llama.cpp as a peer, run by the Python of its own environment: `llama_cpp_peer.py FILE.gguf THREADS`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from channel import claim_output, serve  # type: ignore[import-not-found]


def main() -> None:
    file, threads = sys.argv[1:3]
    answers = claim_output()
    import llama_cpp  # type: ignore[import-not-found]

    engine = llama_cpp.Llama(
        model_path=file, n_ctx=2048, n_threads=int(threads), n_threads_batch=int(threads), verbose=False
    )

    def generate(prompts: Sequence[Sequence[int]], question: dict[str, Any]) -> list[list[int]]:
        return [_one(engine, prompt, question) for prompt in prompts]

    serve(generate, llama_cpp.__version__, answers)


def _one(engine: Any, prompt: Sequence[int], question: dict[str, Any]) -> list[int]:
    """Exactly so many tokens: stop tokens are answered past, as all contestants do here."""
    engine.reset()
    engine.set_seed(question["seed"])
    drawn = engine.generate(
        list(prompt), top_k=0, top_p=question["top_p"], min_p=0.0, temp=question["temperature"], repeat_penalty=1.0
    )
    return list(itertools.islice(drawn, question["tokens"]))


if __name__ == "__main__":
    main()
