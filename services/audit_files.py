"""Mismatches of the audit as JSON files: everything needed to replay one, the prompt included."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2 as pb_types
from outrider.version import __version__
from scheduler.audit import AuditCase, Mismatch
from services.codec_sampling import ACCEPT_RULES, encode_grammar

FORMAT = 1
MAX_FILES = 100
"""Of a folder; the oldest make room."""


class InvalidAuditFile(ValueError):
    """The message is fit for the user."""


@dataclass(frozen=True, slots=True)
class AuditFile:
    """request: with which the answer is decoded again. position: of the difference, in the answer."""

    request: pb.GenerateRequest
    served: tuple[int, ...]
    position: int


class AuditFolder:
    """Keeps mismatches in `folder`, one file each, readable by its owner only. A `scheduler.audit.Sink`."""

    def __init__(self, folder: Path, max_files: int = MAX_FILES) -> None:
        self._folder = folder
        self._max_files = max_files

    def __call__(self, mismatch: Mismatch) -> str:
        try:
            return f"replay it with `outrider replay {self.write(mismatch)}`"
        except OSError as error:
            return f"it could not be kept: {error}"

    def write(self, mismatch: Mismatch) -> Path:
        """Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = sorted(self._folder.glob("audit-*.json"))
        for path in kept[: max(len(kept) - self._max_files + 1, 0)]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        now = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
        path = self._folder / f"audit-{stamp}.{int(now * 1e6) % 10**6:06d}Z-{mismatch.case.sequence_id}.json"
        content = json.dumps(as_dict(mismatch), indent=1, allow_nan=False)
        part = path.with_suffix(".part")  # who watches the folder finds whole files only
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(content + "\n")
            return part.rename(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def as_dict(mismatch: Mismatch) -> dict[str, Any]:
    case = mismatch.case
    difference = asdict(mismatch.difference)
    if difference["margin"] == float("inf"):
        difference["margin"] = "inf"  # the law left one token
    return {
        "format": FORMAT,
        "version": __version__,
        "sequence_id": case.sequence_id,
        "target_worker": case.target_worker,
        "audited_on": mismatch.audited_on,
        "request": MessageToDict(replay_request(case), preserving_proto_field_name=True),
        "served": {"token_ids": list(case.token_ids), "finish_reason": case.finish_reason.value},
        "plain": {"token_ids": list(mismatch.plain_token_ids)},
        "difference": difference,
        "noise": mismatch.noise,
        "speculation": asdict(case.finished.speculation),
    }


def replay_request(case: AuditCase) -> pb.GenerateRequest:
    """The request as a client would send it to get the same answer, every default resolved. An answer that its text
    ended is decoded up to there."""
    sampling, stop = case.request.sampling, case.replay_stop
    max_tokens = stop.max_length - stop.prompt_length
    message = pb.GenerateRequest(
        model=case.request.model,
        tokens=pb.TokenPrompt(token_ids=case.request.token_ids),
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=sorted(stop.stop_token_ids),
        draft_length=case.request.draft_length,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[pb_types.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        accept_rule=ACCEPT_RULES[sampling.accept_rule],
        bad_word_ids=[pb_types.TokenSequence(token_ids=word) for word in sampling.bad_words],
    )
    if sampling.grammar is not None:
        message.grammar.CopyFrom(encode_grammar(sampling.grammar))
    else:  # the API takes neither beside a grammar; with one the model's own stop tokens always apply
        message.ignore_eos = True
        message.min_tokens = min(stop.min_length - stop.prompt_length, max_tokens)
    return message


def read(path: Path) -> AuditFile:
    """Raises InvalidAuditFile."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidAuditFile(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidAuditFile(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidAuditFile(f"{path} is not an audit file of format {FORMAT}")
    try:
        request = ParseDict(content["request"], pb.GenerateRequest())
        served = tuple(int(token_id) for token_id in content["served"]["token_ids"])
        return AuditFile(request, served, int(content["difference"]["position"]))
    except (KeyError, TypeError, ValueError, ParseError) as error:
        raise InvalidAuditFile(f"{path} is damaged: {type(error).__name__} {error}") from error
