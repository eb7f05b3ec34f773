"""Server-sent events as OpenAI writes them."""

from __future__ import annotations

import json
import secrets

from services.http.token_text import Json

DONE = b"data: [DONE]\n\n"
OBFUSCATION_BYTES = 64
"""What a chunk says is padded to a multiple of this, so that its size does not tell how long a token is."""


def encode(chunk: Json) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def obfuscated(chunk: Json) -> Json:
    """With random padding."""
    size = len(json.dumps(chunk["choices"], ensure_ascii=False, separators=(",", ":")).encode())
    return {**chunk, "obfuscation": random_text(-size % OBFUSCATION_BYTES)}


def random_text(length: int) -> str:
    return secrets.token_urlsafe(length)[:length]
