"""vLLM's CPU build as a peer, run by the Python of its own environment: `vllm_peer.py TARGET DRAFT|-`,
with the settings of `known.py` in the environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from channel import claim_output, serve  # type: ignore[import-not-found]
from known import VLLM_OPTIONS  # type: ignore[import-not-found]

CANDIDATES = 5


def main() -> None:
    target, draft = sys.argv[1:3]
    answers = claim_output()
    import vllm  # type: ignore[import-not-found]

    options: dict[str, Any] = {"model": target, "enable_prefix_caching": False, **VLLM_OPTIONS}
    if draft != "-":
        options["speculative_config"] = {"model": draft, "num_speculative_tokens": CANDIDATES, "method": "draft_model"}
    engine = vllm.LLM(**options)

    def generate(prompts: Sequence[Sequence[int]], question: dict[str, Any]) -> list[list[int]]:
        parameters = vllm.SamplingParams(
            max_tokens=question["tokens"],
            min_tokens=question["tokens"],
            temperature=question["temperature"],
            top_p=question["top_p"],
            seed=question["seed"],
        )
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    serve(generate, vllm.__version__, answers)


if __name__ == "__main__":
    main()
