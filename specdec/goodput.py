"""Goodput: expected committed tokens per second, and the choice that maximises it.

Everything is a pure function of `Inputs`, so that a decision can be explained and replayed. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from specdec.decision import OFF, Decision
from specdec.estimates import Knots

LENGTH_MARGIN = 0.01
MODE_MARGIN = 0.03
"""Gain, as a share of this sequence's plain rate, below which a decision is kept; of another length, and of being off
or drafting ahead."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a round takes besides what the models explain: plain, stop-and-wait, and of ahead blocks."""

    plain: float = 0.0
    wait: float = 0.0
    hit: float = 0.0
    miss: float = 0.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a decision is made from.

    acceptance: by depth, given that all depths above were accepted. rescue: chance that one more sibling is the token
    when those before it are not. ahead: chance that an ahead block is there and hits behind a block that was right
    throughout, as a share of the acceptance at that depth. verify: seconds by packed rows of the whole forward; draft:
    seconds by draft length. ahead_extra: how much longer verifying takes while the drafter works. other_rows,
    other_tokens: of the sequences that share the forward, per step.
    """

    acceptance: tuple[float, ...]
    verify: Knots
    draft: Knots
    link: float = 0.0
    rescue: float = 0.0
    ahead: float = 1.0
    ahead_extra: float = 0.0
    overheads: Overheads = Overheads()
    other_rows: float = 0.0
    other_tokens: float = 0.0
    max_draft_length: int = 16
    max_width: int = 1
    max_window: int = 1


@dataclass(frozen=True, slots=True)
class Explained:
    """A decision with its reasons. goodput: tokens per second that were expected of it, plain: of decoding plainly;
    both with those of the others in the forward. note: what else decided."""

    inputs: Inputs
    decision: Decision
    goodput: float
    plain: float
    note: str = ""


def choose(
    inputs: Inputs, current: Decision = OFF, margins: tuple[float, float] = (LENGTH_MARGIN, MODE_MARGIN)
) -> Explained:
    """The decision of highest goodput; `current` is kept unless another is better by its margin."""
    plain = goodput(inputs, OFF)
    best, best_goodput = OFF, plain
    for decision in _options(inputs):
        found = goodput(inputs, decision)
        if found > best_goodput:
            best, best_goodput = decision, found
    if best != current and _allowed(inputs, current):
        kept = goodput(inputs, current)
        same_mode = best.off == current.off and (best.window > 1) == (current.window > 1)
        own = plain - inputs.other_tokens / _seconds(inputs, 1)
        if best_goodput - kept <= own * margins[0 if same_mode else 1]:
            return Explained(inputs, current, kept, plain, "kept: nothing is better by the margin")
    return Explained(inputs, best, best_goodput, plain)


def goodput(inputs: Inputs, decision: Decision) -> float:
    """Expected committed tokens per second, those of the other sequences in the forward included."""
    over, length = inputs.overheads, decision.draft_length
    verify = _seconds(inputs, decision.rows) + (inputs.ahead_extra if decision.window > 1 else 0.0)
    others = inputs.other_tokens / verify
    if decision.off:
        return others + 1 / _positive(verify + over.plain, verify)
    reach = _reach(inputs, decision)
    expected = 1 + sum(reach)
    draft = inputs.draft(length)
    round_trip = _positive(verify + draft + inputs.link + over.wait, verify)
    if decision.window == 1:
        return others + expected / round_trip
    # A run: one block that was waited for, then hits as long as everything is right, the guess of the bonus included.
    bonus = inputs.ahead * inputs.acceptance[min(length, len(inputs.acceptance) - 1)]
    first_hit = reach[-1] * bonus
    again = (reach[-2] if length > 1 else 1.0) * bonus
    hits = first_hit / (1 - min(again, 0.999))
    hit_time = _positive(max(verify, draft, round_trip / decision.window) + over.hit, verify)
    tokens = expected + hits * (expected - reach[-1])
    return others + tokens / (_positive(round_trip + over.miss, verify) + hits * hit_time)


def _options(inputs: Inputs) -> Iterator[Decision]:
    """Each length and width, stop-and-wait and with the smallest window that hides what can be hidden."""
    for width in range(1, inputs.max_width + 1):
        for length in range(1, min(inputs.max_draft_length, len(inputs.acceptance)) + 1):
            yield Decision(length, width)
            if inputs.max_window > 1:
                verify, draft = _seconds(inputs, 1 + length * width) + inputs.ahead_extra, inputs.draft(length)
                whole = verify + draft + inputs.link + inputs.overheads.wait
                enough = math.ceil(whole / max(verify, draft, 1e-9) - 1e-9)
                yield Decision(length, width, min(max(enough, 2), inputs.max_window))


def _allowed(inputs: Inputs, decision: Decision) -> bool:
    longest = min(inputs.max_draft_length, len(inputs.acceptance))
    return (
        not decision.probe
        and decision.draft_length <= longest
        and decision.width <= inputs.max_width
        and decision.window <= inputs.max_window
    )


def _reach(inputs: Inputs, decision: Decision) -> list[float]:
    """Chance that each depth is accepted, all above included."""
    missed_by_all = (1 - inputs.rescue) ** (decision.width - 1)
    reach, chance = [], 1.0
    for rate in inputs.acceptance[: decision.draft_length]:
        chance *= 1 - (1 - rate) * missed_by_all
        reach.append(chance)
    return reach


def _seconds(inputs: Inputs, rows: int) -> float:
    return max(inputs.verify(inputs.other_rows + rows), 1e-6)


def _positive(seconds: float, verify: float) -> float:
    """Estimates of overheads may be negative; a round is never shorter than half its verify."""
    return max(seconds, verify / 2)
