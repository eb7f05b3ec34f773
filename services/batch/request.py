"""One request of a batch: a line of the input file, in OpenAI's form."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

METHOD = "POST"
URLS = ("/v1/chat/completions", "/v1/completions")
FIELDS = ("custom_id", "method", "url", "body")
MAX_CUSTOM_ID = 512


class InvalidLine(ValueError):
    """The message names the field and what it must be."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """body: JSON, as it is sent."""

    custom_id: str
    url: str
    body: bytes

    @property
    def id(self) -> str:
        """A digest of all that was asked, so that an answer shows whether its request has been changed since."""
        asked = json.dumps([self.custom_id, METHOD, self.url]).encode()
        return "batch_req_" + hashlib.blake2b(asked + self.body, digest_size=16).hexdigest()


def read_request(line: bytes) -> BatchRequest:
    """Raises InvalidLine."""
    values = read_object(line)
    for name in FIELDS:
        if name not in values:
            raise InvalidLine(f"{name}: this field is required")
    unknown = sorted(values.keys() - set(FIELDS))
    if unknown:
        raise InvalidLine(f"{unknown[0]}: this field is not known; there are {', '.join(FIELDS)}")
    custom_id, url, body = values["custom_id"], values["url"], values["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise InvalidLine(f"custom_id is {_shown(custom_id)}, must be a text of 1 to {MAX_CUSTOM_ID} characters")
    if values["method"] != METHOD:
        raise InvalidLine(f"method is {_shown(values['method'])}, must be {METHOD}")
    if url not in URLS:
        raise InvalidLine(f"url is {_shown(url)}, must be {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise InvalidLine(f"body is {_shown(body)}, must be an object")
    if body.get("stream"):
        raise InvalidLine("body.stream must be left out: the answers of a batch are whole")
    return BatchRequest(custom_id, url, json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_object(line: bytes) -> dict[str, Any]:
    """Raises InvalidLine."""
    try:
        values = json.loads(line)
    except UnicodeDecodeError:
        raise InvalidLine("it is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidLine(f"it is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidLine("it is no JSON object")
    return values


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
