"""How many token ids of a model folder are real."""

from __future__ import annotations

import json
import re
from pathlib import Path

PLACEHOLDER = re.compile(r"\[PAD\d+\]")
"""Names that converters give to rows of the embedding which have no token."""


def real_vocabulary_size(folder: Path) -> int | None:
    """One more than the highest id that is no placeholder, read from `tokenizer.json`; None if there is none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    # A Unigram vocabulary is a list of [token, score], the others map token to id.
    tokens = {entry[0]: i for i, entry in enumerate(vocabulary)} if isinstance(vocabulary, list) else dict(vocabulary)
    tokens |= {added["content"]: added["id"] for added in content.get("added_tokens", ())}
    return max((int(i) for token, i in tokens.items() if not PLACEHOLDER.fullmatch(token)), default=-1) + 1 or None
