"""Every sampling parameter by itself, and all of them together, for a byte-level table model that writes text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.generation import TokenPrompt, UserRequest
from tools.characters import byte_level

WRITER = byte_level()
TOKENS = 20
BAD_WORDS = ("好", "s", "en", "ing", "é", "t.", "🎠 ")
ALLOWED = tuple(i for i, piece in enumerate(WRITER.pieces) if piece and piece[0] not in b"aeiou\xf0")
BIAS = (
    *((token_id, -100.0) for token_id in b"t "),
    *((token_id, 3.5) for token_id in (b"b"[0], 258, 266)),
    (264, -1.5),
)

EDITS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition below one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 2.0},
    "presence below zero": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.7},
    "frequency below zero": {"frequency_penalty": -1.2},
    "bias": {"logit_bias": BIAS},
    "bad words": {"bad_words": BAD_WORDS},
    "allowed": {"allowed_token_ids": ALLOWED},
    "min tokens": {"min_tokens": 12, "stop_token_ids": (*range(97, 123), 32, 44, 46, 256, 257)},
}
"""Also at temperature 0."""

FILTERS: dict[str, dict[str, Any]] = {
    "top k": {"top_k": 4},
    "top p": {"top_p": 0.6},
    "min p": {"min_p": 0.3},
    "typical p": {"typical_p": 0.4},
    "filters": {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9},
}

ALL = {name: value for fields in EDITS.values() for name, value in fields.items()}


def bare(number: int, temperature: float) -> UserRequest:
    """prompts are all different. The end of the text is not drawn, so that every answer is long."""
    prompt = TokenPrompt((*f"{number:03d} the good".encode(), 256, 265, 266))
    return UserRequest(prompt, max_tokens=TOKENS, temperature=temperature, seed=number, ignore_eos=True)


def parameter_requests() -> dict[str, UserRequest]:
    """By name; the same with nothing asked is `bare` of the same prompt, seed and temperature."""
    greedy = {f"greedy {name}": (0.0, fields) for name, fields in EDITS.items()}
    drawn = {f"drawn {name}": (1.1, fields) for name, fields in (EDITS | FILTERS).items()}
    together: dict[str, tuple[float, dict[str, Any]]] = {
        "greedy all": (0.0, ALL),
        "drawn all": (1.1, ALL | FILTERS["filters"]),
        "greedy bias and repetition": (0.0, {"logit_bias": BIAS, "repetition_penalty": 1.6}),
        "cold": (0.3, {}),
        "hot": (1.9, {}),
    }
    everything = greedy | drawn | together
    return {
        name: replace(bare(number, temperature), **fields)
        for number, (name, (temperature, fields)) in enumerate(everything.items())
    }


def without_parameters(request: UserRequest) -> UserRequest:
    return UserRequest(
        request.prompt,
        max_tokens=request.max_tokens,
        temperature=1.0 if request.temperature else 0.0,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
    )


def bad_word_ids(request: UserRequest) -> list[list[int]]:
    """This tokenizer knows no merges: a word is its bytes."""
    return [list(word.encode()) for word in request.bad_words]
