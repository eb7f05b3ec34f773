"""How a token is drawn and where a sequence ends, with every default resolved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

SEED_LIMIT = 2**64
MAX_LOGIT_BIAS = 100.0
MAX_TOP_LOGPROBS = 128


class AcceptRule(Enum):
    """Which candidates become committed tokens; see `specdec.accept`."""

    INVARIANT = "invariant"
    """The text is a function of request, seed and target model only."""
    REJECTION = "rejection"
    """Ratio test per token (Leviathan et al. 2023)."""
    BLOCK = "block"
    """Ratio test per block; chains only (Sun et al. 2024)."""


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    """`text` is a JSON array of strings."""
    LARK = "grammar"
    """`text` is a grammar in llguidance's Lark dialect."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer must match, from `prompt_length` on."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The law of the next token as a function of the model's logits and of the tokens before.

    temperature: 0 is greedy (no noise); top_k: 0 is off; top_p, typical_p: 1 is off; min_p: 0 is off.
    repetition_penalty (1 is off) counts prompt and answer, presence_penalty and frequency_penalty (0 is off) the answer
    only. logit_bias: (token id, added to its logit), by id. bad_words: token sequences that must not be completed.
    allowed_token_ids: only these may be drawn; empty: all. seed: key of the noise.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    accept_rule: AcceptRule = AcceptRule.INVARIANT
    grammar: Grammar | None = None

    def validate(self) -> None:
        """Raises ValueError whose message begins with the field and gives the allowed range."""
        for name, (low, high, open_low) in _RANGES.items():
            value = getattr(self, name)
            inside = (low < value if open_low else low <= value) and value <= high
            if not inside or not math.isfinite(value):
                bracket = "(" if open_low else "["
                raise ValueError(f"{name} is {value:g}, must be in {bracket}{low:g}, {high:g}]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, must be 0 (off) or more")
        if not 0 <= self.seed < SEED_LIMIT:
            raise ValueError(f"seed is {self.seed}, must be in [0, 2^64)")
        for token_id, bias in self.logit_bias:
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise ValueError(f"logit_bias of token {token_id} is {bias:g}, must be in [-100, 100]")
        if any(not word for word in self.bad_words):
            raise ValueError("bad_words holds an empty word, every word needs at least one token")

    @property
    def depends_on_history(self) -> bool:
        """Whether the law at a position depends on the tokens before it other than through the model."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or any(len(word) > 1 for word in self.bad_words)
            or self.grammar is not None
        )

    def token_ids(self) -> Mapping[str, set[int]]:
        """Token ids that a field names, to be checked against a vocabulary."""
        return {
            "logit_bias": {token_id for token_id, _ in self.logit_bias},
            "bad_words": {token_id for word in self.bad_words for token_id in word},
            "allowed_token_ids": set(self.allowed_token_ids),
        }


_RANGES = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 100.0, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}


class LogprobsOf(Enum):
    PROCESSED = "processed"
    """The law that the token was drawn from."""
    RAW = "raw"
    """The model's own softmax, before anything was done to it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the target tells of each token beside its id. top_logprobs: None tells no logprobs, 0 the token's own only.
    margins: by how much the token won, to tell a near-tie from a fault. noise: of such a margin; see
    `specdec.margins`."""

    top_logprobs: int | None = None
    logprobs_of: LogprobsOf = LogprobsOf.RAW
    margins: bool = False
    noise: float = 0.0


NO_REPORT = Report()


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Token-level stops as absolute lengths of the log, so that a resume needs no arithmetic.

    The log ends at `max_length` at the latest. Stop tokens are not drawn before it has `min_length` tokens.
    """

    prompt_length: int
    max_length: int
    min_length: int = 0
    stop_token_ids: frozenset[int] = frozenset()
