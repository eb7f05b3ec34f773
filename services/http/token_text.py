"""How a token is shown beside its log probability."""

from __future__ import annotations

import math
from typing import Any

from services.tokenizer import Tokenizer
from specdec.messages import TokenLogprobs

Json = dict[str, Any]

IMPOSSIBLE = -9999.0
"""OpenAI's number for a probability of zero: JSON has no infinity."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


class TokenText:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat_entry(self, token_id: int, logprobs: TokenLogprobs) -> Json:
        """One entry of `logprobs.content`."""
        top = [self._chat_token(other, logprob) for other, logprob in logprobs.top]
        return {**self._chat_token(token_id, logprobs.logprob), "top_logprobs": top}

    def name(self, token_id: int) -> str:
        """The text of a token; part of a character is written as its bytes, since names are keys."""
        content = self._tokenizer.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        content = self._tokenizer.token_bytes(token_id)
        return {"token": content.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(content)}
