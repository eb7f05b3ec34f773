"""A scheduler that answers by script: what a gateway and its clients are tried on, without workers.

The model "bytes" has one token per byte, so that every text is known and characters can be cut anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from scheduler.errors import ModelNotFound, RequestError, Unavailable
from scheduler.request import Event, Finished, GenerationRequest, SpeculationSummary, Started, Tokens
from scheduler.scheduler import WorkerView
from services.detokenizer import BYTE_ALPHABET
from specdec.commit import FinishReason, TokenSource
from specdec.messages import Identity, Load, Role, TokenizerBundle

END = "<|end|>"
END_ID = 256
CONTEXT = 1024
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def bytes_tokenizer() -> bytes:
    """tokenizer.json whose token ids are the bytes, and END."""
    vocabulary = dict(BYTE_ALPHABET)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(END, special=True)])
    return inner.to_str().encode()


def bytes_bundle(
    name: str = "bytes", context_length: int = CONTEXT, template: str | None = TEMPLATE
) -> TokenizerBundle:
    return TokenizerBundle(name, bytes_tokenizer(), template, None, (END_ID,), context_length, 257, {"eos_token": END})


def target_identity(name: str = "bytes", context_length: int = CONTEXT, sha256: str = "ab") -> Identity:
    return Identity("target-1", Role.TARGET, name, 257, sha256, context_length=context_length)


@dataclass
class ScriptedScheduler:
    """answer: committed in blocks of `block` tokens until it, max_tokens or the error after `fail_after` tokens ends
    it. gate: each block at position `gated_from` or later waits for it. Requests, cancels and tokenizer calls are
    counted."""

    answer: Sequence[int] = tuple(b"hello")
    block: int = 2
    fail_after: int | None = None
    error: RequestError = field(default_factory=lambda: Unavailable("no live target"))
    bundles: dict[str, TokenizerBundle] = field(default_factory=lambda: {"bytes": bytes_bundle()})
    identities: list[Identity] = field(default_factory=lambda: [target_identity()])
    ready: bool = True
    unending: bool = False
    fail_at_start: Exception | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    tokenizer_calls: int = 0
    running: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    gated_from: int = 0
    added: list[tuple[Role, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        if self.fail_at_start is not None:
            raise self.fail_at_start
        self.running += 1
        try:
            yield Started("sequence-1", request.model, request.sampling.seed, len(request.token_ids))
            told, watched = 0, False
            async for tokens in self._blocks(request):
                kept = request.watcher.ends_after(tokens.token_ids) if request.watcher else None
                watched = kept is not None
                yield tokens if kept is None else _first(tokens, kept)
                told = tokens.position + (kept or len(tokens.token_ids))
                if watched:
                    break
            if not self.unending:
                last = self.answer[told - 1] if told else None
                reason = FinishReason.STOP if watched or last in request.stop_token_ids else FinishReason.LENGTH
                summary = SpeculationSummary(num_drafts=2, num_draft_tokens=4, num_accepted_tokens=3, num_plain_steps=1)
                yield Finished(reason, len(request.token_ids), told, summary, 0.5, 0.25)
        finally:
            self.running -= 1
            self.cancelled.set()

    async def _blocks(self, request: GenerationRequest) -> AsyncIterator[Tokens]:
        limit = min(len(self.answer), request.max_tokens or len(self.answer))
        for position in range(0, limit, self.block):
            if position >= self.gated_from:
                await self.gate.wait()
            if self.fail_after is not None and position >= self.fail_after:
                raise self.error
            ids = tuple(self.answer[position : min(position + self.block, limit)])
            sources = (TokenSource.ACCEPTED,) * (len(ids) - 1) + (TokenSource.BONUS,)
            yield Tokens(position, ids, sources, bytes([position % 256]) * 16)

    def models(self) -> Sequence[Identity]:
        return self.identities

    async def tokenizer(self, model: str) -> TokenizerBundle:
        self.tokenizer_calls += 1
        await asyncio.sleep(0)
        if not model and len(self.bundles) == 1:
            return next(iter(self.bundles.values()))
        if model not in self.bundles:
            raise ModelNotFound(f"no model {model!r} is served; there are: {', '.join(self.bundles)}")
        return self.bundles[model]

    async def workers(self) -> list[WorkerView]:
        return [WorkerView("host:1", Role.TARGET, "ready", "", identity, Load()) for identity in self.identities]

    def active_sequences(self) -> int:
        return self.running

    def add_worker(self, role: Role, address: str) -> None:
        self.added.append((role, address))


def _first(tokens: Tokens, count: int) -> Tokens:
    return replace(tokens, token_ids=tokens.token_ids[:count], sources=tokens.sources[:count])
