"""vLLM's CPU build as a peer, run by the Python of its own environment: `vllm_peer.py TARGET DRAFT|- THREADS`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from channel import claim_output, serve  # type: ignore[import-not-found]

CANDIDATES = 5


def main() -> None:
    target, draft, threads = sys.argv[1:4]
    answers = claim_output()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm  # type: ignore[import-not-found]

    options: dict[str, Any] = {"model": target, "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 64}
    options["enable_prefix_caching"] = False
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
