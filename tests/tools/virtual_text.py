"""What the target of a virtual system says, and where its drafter is right: functions of prompt and position alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

VOCABULARY_SIZE = 64


@dataclass(frozen=True, slots=True)
class Guess:
    """What the drafter has for a position, given that it was right before. confidence: None if it does not say."""

    right: bool
    confidence: float | None = None


Luck = Callable[[int, int], Guess | None]
"""By number of the prompt and tokens behind it. None: it has nothing to propose here."""


def token(position: int) -> int:
    return (7 * position + 3) % (VOCABULARY_SIZE - 2)


def wrong_token(position: int) -> int:
    return (token(position) + 1) % (VOCABULARY_SIZE - 2)


def steady(acceptance: float) -> Luck:
    """Right by the same chance everywhere; it does not know how sure it is."""
    return by_phase(lambda position: acceptance)


def by_phase(chance: Callable[[int], float]) -> Luck:
    """chance: by tokens behind the prompt."""

    @cache
    def luck(prompt: int, position: int) -> Guess:
        return Guess(random.Random(f"{prompt} {position}").random() < chance(position))

    return luck


def mixed(acceptance: float, spread: float = 1.5, calibration: float = 0.8) -> Luck:
    """Each position has a chance of its own, `acceptance` on the average: most are nearly sure or nearly hopeless, as
    those of language models are. The drafter knows, but is surer than it should be.

    spread: of the beta distribution that chances are drawn from; the smaller, the more they differ. calibration: the
    power of a chance that it tells as its confidence.
    """

    @cache
    def luck(prompt: int, position: int) -> Guess:
        rng = random.Random(f"{prompt} {position}")
        chance = rng.betavariate(acceptance * spread, (1 - acceptance) * spread)
        return Guess(rng.random() < chance, chance**calibration)

    return luck


def copying(right: float, found: float) -> Luck:
    """A drafter that looks text up: finds something at the share `found` of stretches of 8 tokens, and knows nothing
    elsewhere."""

    @cache
    def luck(prompt: int, position: int) -> Guess | None:
        if random.Random(f"{prompt} stretch {position // 8}").random() >= found:
            return None
        return Guess(random.Random(f"{prompt} {position}").random() < right)

    return luck


def begins_to_copy(first: int, spread: int) -> Luck:
    """A drafter that looks text up, where texts are new at first and repeat themselves from some token on, `first` at
    the earliest and `first + spread` at the latest."""

    @cache
    def luck(prompt: int, position: int) -> Guess | None:
        begins = first + random.Random(f"{prompt} begins").randrange(spread)
        found, right = (0.15, 0.1) if position < begins else (0.95, 0.95)
        if random.Random(f"{prompt} {position} found").random() >= found:
            return None
        return Guess(random.Random(f"{prompt} {position}").random() < right)

    return luck


def repeating(period: int, copied: int) -> Luck:
    """Lines of `period` tokens; a drafter that looks text up finds the last `copied` of each, and then goes wrong once
    the line ends."""

    def luck(prompt: int, position: int) -> Guess | None:
        return Guess(True) if position % period >= period - copied else None

    return luck


def chain(luck: Luck, prompt: int, position: int, length: int) -> Sequence[tuple[int, Guess]]:
    """Candidates from `position` on."""
    found: list[tuple[int, Guess]] = []
    for at in range(position, position + length):
        guess = luck(prompt, at)
        if guess is None:
            break
        found.append((token(at) if guess.right else wrong_token(at), guess))
    return found
