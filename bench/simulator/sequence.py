"""A sequence of the model: how long its log is in each process, and which drafted tokens are right."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Block:
    """Candidates for the positions from `base` up to `end`. right_until: where it, or what it was drafted behind, is
    wrong for the first time; `end` if it is right throughout."""

    sequence: SimSequence
    base: int
    end: int
    right_until: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target committed up to `length`; drafted: candidates that it checked."""

    sequence: SimSequence
    length: int
    drafted: int
    accepted: int


@dataclass(slots=True, eq=False)
class SimSequence:
    """Lengths are of the answer. length: committed by the target. known: told to the scheduler. prompt: rows of its
    prefill. pending: what the target may verify next; None: nothing. held: blocks beyond the log."""

    max_tokens: int
    prompt: int
    arrived: float
    target: int = 0
    drafter: int = 0
    scheduler: int = 0
    length: int = 0
    known: int = 0
    prefilled: bool = False
    pending: Block | None = None
    held: list[Block] = field(default_factory=list)
    draft_log: int = 0
    draft_committed: int = 0
    wrong_at: int | None = None
    """Where the drafter's tail is wrong for the first time; None: it is right throughout."""
    in_flight: list[int] = field(default_factory=list)
    due: bool = False
    version: int = 0
    """Of the drafter's log: grows when it is rolled back."""
    first_token_at: float | None = None

    @property
    def finished(self) -> bool:
        return self.length >= self.max_tokens

    # ---- at the target

    def offer(self, block: Block) -> None:
        """A block arrives: it is held, becomes what is verified next, or is stale."""
        if block.base > self.length:
            self.held.append(block)
        elif block.right_until >= self.length:
            self.pending = block

    def verify(self) -> Verdict:
        """Takes the pending block down to the first wrong candidate and adds one token of the target's own."""
        block, self.pending = self.pending, None
        end = self.length if block is None else max(min(block.end, self.max_tokens - 1), self.length)
        right = self.length if block is None else min(block.right_until, end)
        drafted, accepted = end - self.length, max(right - self.length, 0)
        self.length = min(self.length + accepted + 1, self.max_tokens)
        held, self.held = self.held, []
        for later in held:
            self.offer(later)
        return Verdict(self, self.length, drafted, accepted)

    # ---- at the drafter

    def advance(self, length: int) -> None:
        """The drafter hears that the log has `length` tokens; of its tail stays what is right."""
        if self.wrong_at is not None and self.wrong_at < length:
            self.draft_log, self.wrong_at = length, None
            self.version += 1
        elif self.draft_log < length:
            self.draft_log = length
            self.version += 1
        self.draft_committed = max(length, self.draft_committed)
        self.in_flight = [end for end in self.in_flight if self.draft_committed < end <= self.draft_log]

    def drafted(self, rights: list[bool]) -> Block:
        """Draws the next block behind the tail. rights: whether each candidate is right, if all before it are."""
        base = self.draft_log
        self.draft_log += len(rights)
        if self.wrong_at is None and not all(rights):
            self.wrong_at = base + rights.index(False)
        self.in_flight.append(self.draft_log)
        right_until = self.draft_log if self.wrong_at is None else min(self.wrong_at, self.draft_log)
        return Block(self, base, self.draft_log, right_until)
