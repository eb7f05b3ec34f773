"""What scheduler and workers tell each other, as values; `services.codec` puts them on the wire.

Every item names `(sequence_id, epoch, base_length, prefix_digest)`: it applies to the log as it was at `base_length`
tokens, whose chained digest was `prefix_digest`. Durations are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from specdec.candidates import EMPTY, CandidateTree
from specdec.commit import FinishReason, TokenSource
from specdec.params import NO_REPORT, Report, SamplingParams, StopConditions
from specdec.value import value

PROTOCOL_VERSION = 1


@value
class Epoch:
    """An owner's claim on a sequence."""

    number: int
    owner: str

    def may_replace(self, held: Epoch) -> bool:
        """A worker refuses a lower number, and an equal number from another owner."""
        return self.number > held.number or self == held


@value
class Header:
    sequence_id: str
    epoch: Epoch
    base_length: int
    prefix_digest: bytes
    traceparent: str = ""
    tracestate: str = ""
    time_remaining: float | None = None


class RefusalReason(Enum):
    EPOCH = "epoch"
    UNKNOWN_SEQUENCE = "unknown_sequence"
    INVALID = "invalid"
    CAPACITY = "capacity"
    DRAINING = "draining"


@value
class Refusal:
    reason: RefusalReason
    message: str
    held_epoch: Epoch | None = None


@value
class Failure:
    """One sequence failed inside the worker; its neighbours go on."""

    message: str


@value
class NeedTokens:
    have_length: int


@value
class Released:
    pass


@value
class Release:
    pass


# scheduler -> target worker


@value
class Grant:
    """The target may decode plainly up to `until_length` (absolute), waiting `patience` for a block each time."""

    until_length: int
    patience: float = 0.0


@value
class TargetOpen:
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    grant: Grant
    root_digest: bytes
    report: Report = NO_REPORT


@value
class VerifyBlock:
    """Candidates on top of the base; without any it is a plain step."""

    candidates: CandidateTree
    grant: Grant


@value
class TargetItem:
    header: Header
    body: TargetOpen | VerifyBlock | Release


# target worker -> scheduler


@value
class Opened:
    cached_length: int = 0


@value
class Prefilled:
    length: int


@value
class TokenLogprobs:
    """logprob: the token's own. top: the likeliest (token id, logprob), likeliest first. Natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@value
class Committed:
    """Tokens behind the header's base; final.

    num_draft_tokens: candidates verified in this step, 0 for a plain one. repeated_answer: told before, again now.
    logprobs, margins: one per token if the report asks for them.
    """

    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    num_draft_tokens: int = 0
    draft_length: int = 0
    finish_reason: FinishReason | None = None
    step_time: float = 0.0
    batch_size: int = 1
    repeated_answer: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()

    def part(self, start: int, end: int | None = None) -> Committed:
        """What it tells of its tokens from `start` to before `end`."""
        if start == 0 and end is None:
            return self
        tokens = slice(start, end)
        return replace(
            self,
            token_ids=self.token_ids[tokens],
            sources=self.sources[tokens],
            logprobs=self.logprobs[tokens],
            margins=self.margins[tokens],
        )


@value
class StaleBlock:
    log_length: int


@value
class TargetResult:
    header: Header
    body: Opened | Prefilled | Committed | StaleBlock | NeedTokens | Refusal | Failure | Released


# scheduler -> draft worker


@value
class DraftPlan:
    """The standing order; the latest holds. draft_length 0: do not draft. min_confidence: see `DraftJob`. fan_out:
    blocks more for each in flight, for the likeliest ways in which the target may leave it."""

    draft_length: int
    width: int = 1
    window: int = 1
    min_confidence: float = 0.0
    fan_out: int = 0


@value
class DraftOpen:
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    plan: DraftPlan
    root_digest: bytes


@value
class DraftAdvance:
    """Tokens committed behind the header's base."""

    token_ids: tuple[int, ...]
    plan: DraftPlan


@value
class DraftItem:
    header: Header
    body: DraftOpen | DraftAdvance | Release


# draft worker -> scheduler


@value
class DraftBlock:
    """fan_out: its base holds a token that the drafter does not think the likeliest."""

    candidates: CandidateTree = EMPTY
    draft_time: float = 0.0
    fan_out: bool = False


@value
class DraftResult:
    header: Header
    body: DraftBlock | NeedTokens | Refusal | Failure | Released


# any worker


class Role(Enum):
    TARGET = "target"
    DRAFT = "draft"


@value
class Identity:
    """Who a worker is. vocabulary_size 0: a drafter without a model, which fits every target. numeric_noise: of a
    target, measured when it loaded its model: by how much the gap between two logits may move with what is computed
    beside them."""

    worker_id: str
    role: Role
    model_name: str
    vocabulary_size: int = 0
    vocabulary_sha256: str = ""
    vocabulary_run_digests: bytes = b""
    context_length: int = 0
    version: str = ""
    protocol_version: int = PROTOCOL_VERSION
    drafter: str = ""
    device: str = "cpu"
    dtype: str = ""
    numeric_noise: float = 0.0
    turns: str = ""
    """Names what it takes turns for with other workers, forward by forward; empty: nothing."""

    @property
    def drafter_label(self) -> str:
        """What metrics call a drafter: its kind, and its model if it has one."""
        return ":".join(part for part in (self.drafter, self.model_name) if part) or "unnamed"


@dataclass(slots=True)
class Load:
    """Counters of a worker since its start; `sequences` and the KV figures are of now."""

    sequences: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    steps: int = 0
    tokens: int = 0
    largest_batch: int = 0
    stale_blocks: int = 0
    refused_items: int = 0
    prefix_hit_tokens: int = 0


@dataclass(slots=True)
class TokenizerBundle:
    """All that a gateway needs to turn text into ids and back, without the model's files."""

    model_name: str
    tokenizer_json: bytes
    chat_template: str | None
    bos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    context_length: int
    vocabulary_size: int
    special_tokens: dict[str, str] = field(default_factory=dict)
