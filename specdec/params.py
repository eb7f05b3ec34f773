"""How a token is drawn and where a sequence ends, with every default resolved."""

from __future__ import annotations

from dataclasses import dataclass

SEED_LIMIT = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The law of the next token as a function of the model's logits.

    temperature: 0 is greedy (no noise); top_k: 0 is off; top_p: 1 is off; min_p: 0 is off; seed: key of the noise that
    target and drafter share.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def validate(self) -> None:
        """Raises ValueError that names the field and the allowed range."""
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature:g}, must be in [0, 100]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, must be 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p:g}, must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p:g}, must be in [0, 1]")
        if not 0 <= self.seed < SEED_LIMIT:
            raise ValueError(f"seed is {self.seed}, must be in [0, 2^64)")


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Token-level stops as absolute lengths of the log, so that a resume needs no arithmetic.

    The log ends at `max_length` at the latest. Stop tokens are not drawn before it has `min_length` tokens.
    """

    prompt_length: int
    max_length: int
    min_length: int = 0
    stop_token_ids: frozenset[int] = frozenset()
