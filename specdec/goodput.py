"""Goodput: expected committed tokens per second, and the choice that maximises it.

Everything is a pure function of `Inputs`, so that a decision can be explained and replayed. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from specdec.decision import OFF, Decision
from specdec.estimates import Knots

TOGETHER = "pays if the whole batch does"
IN_STEP = "the batch stays in step"
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

    acceptance: by depth, given that all depths above were accepted. proposes: chance that the drafter has any candidate
    when it is asked. rescue: chance that one more sibling is the token when those before it are not. ahead: chance that
    an ahead block is there and hits behind a block that was right throughout, as a share of the acceptance at that
    depth. verify: seconds by packed rows of the whole forward; draft: seconds by draft length. ahead_extra: how much
    longer verifying takes while the drafter works. turns: it never works while the target does. other_rows,
    other_tokens: of the sequences that share the forward, per step. together: by how much it raises the rate of all of
    them if each drafts what it is allotted. in_step: they wait for each other's blocks.
    """

    acceptance: tuple[float, ...]
    verify: Knots
    draft: Knots
    link: float = 0.0
    proposes: float = 1.0
    rescue: float = 0.0
    ahead: float = 1.0
    ahead_extra: float = 0.0
    turns: bool = False
    overheads: Overheads = Overheads()
    other_rows: float = 0.0
    other_tokens: float = 0.0
    together: float = 0.0
    in_step: bool = False
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
    if inputs.in_step:
        return _in_step(inputs, current, plain, margins[1])
    best, best_goodput = OFF, plain
    chosen: tuple[int, int, int] | None = None
    for option, found in _options(inputs):
        if found > best_goodput:
            chosen, best_goodput = option, found
    if chosen is not None:
        best = Decision(*chosen)
    elif inputs.together > MODE_MARGIN and inputs.max_draft_length:
        best = Decision(min(inputs.max_draft_length, len(inputs.acceptance)))
        return Explained(inputs, best, goodput(inputs, best), plain, TOGETHER)
    if best != current and _allowed(inputs, current):
        kept = goodput(inputs, current)
        same_mode = best.off == current.off and (best.window > 1) == (current.window > 1)
        own = plain - inputs.other_tokens / _verify(inputs, 1)
        if best_goodput - kept <= own * margins[0 if same_mode else 1]:
            return Explained(inputs, current, kept, plain, "kept: nothing is better by the margin")
    return Explained(inputs, best, best_goodput, plain)


def _in_step(inputs: Inputs, current: Decision, plain: float, margin: float) -> Explained:
    """Where sequences wait for each other, what one of them does is a part of what pays for all."""
    length = min(inputs.max_draft_length, len(inputs.acceptance))
    pays = length and inputs.together > (margin if current.off else 0.0)
    return Explained(inputs, Decision(length) if pays else OFF, plain * (1 + inputs.together), plain, IN_STEP)


def goodput(inputs: Inputs, decision: Decision) -> float:
    """Expected committed tokens per second, those of the other sequences in the forward included."""
    if decision.off:
        verify = _verify(inputs, 1)
        return inputs.other_tokens / verify + 1 / _at_least(verify + inputs.overheads.plain, verify)
    shape = next(s for s in _shapes(inputs, decision.width) if s.length == decision.draft_length)
    in_vain = _in_vain(inputs)
    return _waiting(inputs, shape, in_vain) if decision.window == 1 else _ahead(inputs, shape, decision.window, in_vain)


class _Shape(NamedTuple):
    """A block: its expected tokens with the correction or bonus, the chance that all of it is accepted, and the same
    one candidate earlier; seconds to verify and to draft it."""

    length: int
    expected: float
    full: float
    full_before: float
    verify: float
    draft: float


def _shapes(inputs: Inputs, width: int) -> Iterator[_Shape]:
    missed_by_siblings = (1 - inputs.rescue) ** (width - 1)
    expected, full = 1.0, 1.0
    for length, rate in enumerate(inputs.acceptance[: inputs.max_draft_length], 1):
        before, full = full, full * (1 - (1 - rate) * missed_by_siblings)
        expected += full
        yield _Shape(length, expected, full, before, _verify(inputs, 1 + length * width), inputs.draft(length))


def _in_vain(inputs: Inputs) -> float:
    """Seconds of a plain step that was held back for a drafter without a candidate."""
    verify = _verify(inputs, 1)
    return _at_least(verify + inputs.draft(1) + inputs.link + inputs.overheads.wait, verify)


def _waiting(inputs: Inputs, shape: _Shape, in_vain: float) -> float:
    """Stop-and-wait: everything one after the other."""
    round_trip = _at_least(shape.verify + shape.draft + inputs.link + inputs.overheads.wait, shape.verify)
    others = _others_meanwhile(inputs, shape, round_trip)
    return others + _if_proposed(inputs, shape.expected, round_trip, in_vain)


def _others_meanwhile(inputs: Inputs, shape: _Shape, round_trip: float) -> float:
    """Tokens per second of the other sequences: with the rows of this one in their forward while it is verified,
    without while it waits, and nothing while its drafter has the machine that the target takes turns for."""
    if not inputs.other_tokens:
        return 0.0
    verifying = min(shape.verify / round_trip, 1.0)
    drafting = min(shape.draft / round_trip, 1.0 - verifying) if inputs.turns else 0.0
    alone = max(inputs.verify(inputs.other_rows), 1e-6)
    return inputs.other_tokens * (verifying / shape.verify + (1.0 - verifying - drafting) / alone)


def _ahead(inputs: Inputs, shape: _Shape, window: int, in_vain: float) -> float:
    """A run: one block that was waited for, then hits as long as everything is right, the guess of the bonus included.
    On a hit the longer of verify and draft is what takes time, if the window is large enough."""
    over, verify = inputs.overheads, shape.verify + inputs.ahead_extra
    bonus = inputs.ahead * inputs.acceptance[min(shape.length, len(inputs.acceptance) - 1)]
    hits = shape.full * bonus / (1 - min(shape.full_before * bonus, 0.999))
    round_trip = _at_least(verify + shape.draft + inputs.link + over.wait, verify)
    hit_time = _at_least(max(verify, shape.draft, round_trip / window) + over.hit, verify)
    run_time = _at_least(round_trip + over.miss, verify) + hits * hit_time
    tokens = shape.expected + hits * (shape.expected - shape.full)
    return inputs.other_tokens / verify + _if_proposed(inputs, tokens, run_time, in_vain)


def _if_proposed(inputs: Inputs, tokens: float, seconds: float, in_vain: float) -> float:
    """Tokens per second, where a drafter that has no candidate leaves a plain step that was waited for."""
    share = inputs.proposes
    return (share * tokens + 1 - share) / (share * seconds + (1 - share) * in_vain)


def _options(inputs: Inputs) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Length, width and window: each length and width, stop-and-wait and with the smallest window that hides what can
    be hidden."""
    in_vain = _in_vain(inputs)
    for width in range(1, inputs.max_width + 1):
        for shape in _shapes(inputs, width):
            yield (shape.length, width, 1), _waiting(inputs, shape, in_vain)
            if inputs.max_window > 1:
                verify = shape.verify + inputs.ahead_extra
                round_trip = verify + shape.draft + inputs.link + inputs.overheads.wait
                enough = math.ceil(round_trip / max(verify, shape.draft) - 1e-9)
                window = min(max(enough, 2), inputs.max_window)
                yield (shape.length, width, window), _ahead(inputs, shape, window, in_vain)


def price_of_one_more(inputs: Inputs, decision: Decision) -> float:
    """Seconds that one more candidate behind the last takes."""
    length, rows = decision.draft_length, inputs.other_rows + decision.rows
    drafting = max(inputs.draft(length) - inputs.draft(length - 1), 0.0) if length > 1 else inputs.draft(1)
    verifying = max(inputs.verify(rows) - inputs.verify(rows - decision.width), 0.0)
    return drafting + verifying


def _allowed(inputs: Inputs, decision: Decision) -> bool:
    longest = min(inputs.max_draft_length, len(inputs.acceptance))
    return (
        not decision.probe
        and decision.draft_length <= longest
        and decision.width <= inputs.max_width
        and decision.window <= inputs.max_window
    )


def _verify(inputs: Inputs, rows: int) -> float:
    return max(inputs.verify(inputs.other_rows + rows), 1e-6)


def _at_least(seconds: float, verify: float) -> float:
    """Estimates of overheads may be negative; a round is never shorter than half its verify."""
    return max(seconds, verify / 2)
