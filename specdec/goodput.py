"""Goodput: expected committed tokens per second, and the choice that maximises it.

Everything is a pure function of `Inputs`, so that a decision can be explained and replayed. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from specdec.decision import OFF, Decision
from specdec.estimates import Knots
from specdec.value import value

TOGETHER = "pays if the whole batch does"
IN_STEP = "the batch stays in step"
_SHORTEST = 1e-6
LENGTH_MARGIN = 0.01
MODE_MARGIN = 0.03
"""Gain, as a share of this sequence's plain rate, below which a decision is kept; of another length, and of being off
or drafting ahead."""


@value
class Overheads:
    """What a round takes besides what the models explain: plain, stop-and-wait, and of ahead blocks."""

    plain: float = 0.0
    wait: float = 0.0
    hit: float = 0.0
    miss: float = 0.0


@value
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


@value
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
    for width in range(1, inputs.max_width + 1):
        for length, waiting, window, ahead in _by_length(inputs, width):
            if waiting > best_goodput:
                chosen, best_goodput = (length, width, 1), waiting
            if ahead > best_goodput:
                chosen, best_goodput = (length, width, window), ahead
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
    found = islice(_by_length(inputs, decision.width, decision.window), decision.draft_length - 1, None)
    _, waiting, _, ahead = next(found)
    return waiting if decision.window == 1 else ahead


def _by_length(inputs: Inputs, width: int, window: int = 0) -> Iterator[tuple[int, float, int, float]]:
    """By draft length from 1: tokens per second of stop-and-wait, everything one after the other; a window, and tokens
    per second of drafting ahead in it. window: 0 for the smallest that hides what can be hidden; 1: it may not.

    Ahead, a run is one block that was waited for, then hits as long as everything is right, the guess of the bonus
    included. On a hit the longer of verify and draft is what takes time, if the window is large enough.
    """
    over, acceptance, draft, verify = inputs.overheads, inputs.acceptance, inputs.draft, inputs.verify
    share, in_vain = inputs.proposes, (1 - inputs.proposes) * _in_vain(inputs)
    link, wait, other_rows, other_tokens = inputs.link, over.wait, inputs.other_rows, inputs.other_tokens
    deepest = len(acceptance)
    only_waits = window == 1 or inputs.max_window == 1
    missed_by_siblings = (1 - inputs.rescue) ** (width - 1)
    expected = full = 1.0  # tokens of a block with the correction or bonus; chance that all of it is accepted
    for length, rate in enumerate(acceptance[: inputs.max_draft_length], 1):
        before, full = full, full * (1 - (1 - rate) * missed_by_siblings)
        expected += full
        verifying, drafting = verify(other_rows + (1 + length * width)) or _SHORTEST, draft(length)
        round_trip = _at_least(verifying + drafting + link + wait, verifying)
        waiting = (share * expected + 1 - share) / (share * round_trip + in_vain)
        if other_tokens:
            waiting += _others_meanwhile(inputs, verifying, drafting, round_trip)
        if only_waits:
            yield length, waiting, 1, 0.0
            continue
        verifying += inputs.ahead_extra
        longer = verifying if verifying > drafting else drafting
        round_trip = verifying + drafting + link + wait
        enough = window or min(max(math.ceil(round_trip / longer - 1e-9), 2), inputs.max_window)
        round_trip = _at_least(round_trip, verifying)
        bonus = inputs.ahead * (acceptance[length] if length < deepest else acceptance[-1])
        again = before * bonus
        hits = full * bonus / (1 - (again if again < 0.999 else 0.999))
        hit_time = _at_least(max(longer, round_trip / enough) + over.hit, verifying)
        run_time = _at_least(round_trip + over.miss, verifying) + hits * hit_time
        tokens = expected + hits * (expected - full)
        ahead = (share * tokens + 1 - share) / (share * run_time + in_vain)
        yield length, waiting, enough, other_tokens / verifying + ahead


def _in_vain(inputs: Inputs) -> float:
    """Seconds of a plain step that was held back for a drafter without a candidate."""
    verify = _verify(inputs, 1)
    return _at_least(verify + inputs.draft(1) + inputs.link + inputs.overheads.wait, verify)


def _others_meanwhile(inputs: Inputs, verify: float, draft: float, round_trip: float) -> float:
    """Tokens per second of the other sequences: with the rows of this one in their forward while it is verified,
    without while it waits, and nothing while its drafter has the machine that the target takes turns for."""
    verifying = min(verify / round_trip, 1.0)
    drafting = min(draft / round_trip, 1.0 - verifying) if inputs.turns else 0.0
    alone = max(inputs.verify(inputs.other_rows), _SHORTEST)
    return inputs.other_tokens * (verifying / verify + (1.0 - verifying - drafting) / alone)


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
    return max(inputs.verify(inputs.other_rows + rows), _SHORTEST)


def _at_least(seconds: float, verify: float) -> float:
    """Estimates of overheads may be negative; a round is never shorter than half its verify."""
    least = verify / 2
    return seconds if seconds > least else least
