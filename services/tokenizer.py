"""Text to token ids and back, from a target's tokenizer bundle alone: no model files, no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.detokenizer import IncrementalDetokenizer, TokenReader, detokenizer, token_bytes
from specdec.messages import TokenizerBundle
from specdec.vocabulary import InvalidTokenizer, read_tokens

__all__ = ["IncrementalDetokenizer", "InvalidTokenizer", "Tokenizer", "load_bundle"]


class Tokenizer:
    """Of one served model. Thread-safe; raises `InvalidTokenizer` if the bundle holds none."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        try:
            content = json.loads(bundle.tokenizer_json)
            self._inner = tokenizers.Tokenizer.from_str(_without_placeholders(content, bundle))
        except Exception as error:  # the library raises bare Exception
            raise InvalidTokenizer(f"cannot read the tokenizer of {bundle.model_name}: {error}") from error
        # A prompt is never cut or padded, whatever the file was last used for.
        self._inner.no_truncation()
        self._inner.no_padding()
        self.bundle = bundle
        self._reader = TokenReader(self._inner)
        self._decoder: dict[str, Any] | None = content.get("decoder")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        add_special_tokens: add what the model's own post-processor puts around a plain prompt (a BOS token for some
        models, nothing for others). A rendered chat template has them in its text: pass False. Raises ValueError if
        the text holds half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not valid Unicode at character {error.start}: half a surrogate pair"
            ) from None
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids that are no tokens are left out."""
        known = [token_id for token_id in token_ids if 0 <= token_id < 1 << 32]
        return str(self._inner.decode(known, skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """For one stream: its pieces join to what `decode` gives for all its ids."""
        return detokenizer(self._inner, self._decoder, self._reader, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special or not; part of a character may be all of it."""
        return token_bytes(self._inner, self._decoder, self._reader, token_id)

    def is_token(self, token_id: int) -> bool:
        """Whether a prompt given as ids may hold this one."""
        return 0 <= token_id < self.bundle.vocabulary_size


def _without_placeholders(content: dict[str, Any], bundle: TokenizerBundle) -> str:
    """A prompt that spells out a placeholder added to the vocabulary's end must not become its id."""
    added = content.get("added_tokens") or []
    real = [token for token in added if token["id"] < bundle.vocabulary_size]
    if len(real) == len(added):
        return bundle.tokenizer_json.decode()
    return json.dumps({**content, "added_tokens": real})


def load_bundle(folder: Path, model_name: str = "") -> TokenizerBundle:
    """Reads a model folder's tokenizer.json, chat template, special and stop ids, and context length.

    model_name: the name it is served by, default the folder's. Raises `InvalidTokenizer`.
    """
    try:
        tokenizer_json = (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise InvalidTokenizer(f"{folder} has no readable tokenizer.json ({error.strerror})") from error
    config, generation, settings = (
        _read_json(folder / name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    special_tokens = _special_tokens(settings, _read_json(folder / "special_tokens_map.json"))
    tokens = read_tokens(tokenizer_json)
    ids = {token.text: token.token_id for token in tokens}
    text_config = {**config, **(config.get("text_config") or {})}
    bos_token = special_tokens.get("bos_token")
    stop_ids = [*_ids(generation.get("eos_token_id")), *_ids(text_config.get("eos_token_id"))]
    if (eos_token := special_tokens.get("eos_token")) is not None:
        stop_ids += _ids(ids.get(eos_token))
    return TokenizerBundle(
        model_name=model_name or folder.name,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, settings),
        bos_token_id=ids.get(bos_token) if bos_token is not None else None,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        context_length=int(text_config.get("max_position_embeddings") or text_config.get("n_positions") or 0),
        vocabulary_size=tokens[-1].token_id + 1,
        special_tokens=special_tokens,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidTokenizer(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidTokenizer(f"{path} holds no JSON object")
    return content


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(token_id) for token_id in value] if isinstance(value, list) else [int(value)]


def _special_tokens(settings: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    """Names that templates use (`bos_token`, ...) with their text; older files write a token as an object."""
    found: dict[str, str] = {}
    for key, value in {**token_map, **settings}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own wins over the tokenizer's settings; of several named templates, "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
