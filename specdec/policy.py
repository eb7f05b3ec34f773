"""The seam between the driver of a sequence and what decides how it speculates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdec.costs import DrafterModel, TargetModel
from specdec.decision import Decision
from specdec.draft_length import DraftLengthPolicy
from specdec.goodput import Explained
from specdec.observations import Observation, PlainStep, Round


class SpeculationPolicy(Protocol):
    """Belongs to one sequence."""

    def attach(self, target: TargetModel, drafter: DrafterModel | None) -> None:
        """The sequence is served by these now; what is known of them is shared with their other sequences."""
        ...

    def decide(self) -> Decision:
        """For the next block. A probe is decided once; what became of it is to be observed."""
        ...

    def observe(self, observation: Observation) -> None: ...

    def explained(self) -> Sequence[Explained]:
        """The latest decisions with what they were made from, oldest first; empty if the policy gives no reasons."""
        ...

    def close(self) -> None:
        """The sequence has ended."""
        ...


class Standing:
    """A policy that chooses the length alone, under a width and a window that stand. Implements SpeculationPolicy."""

    def __init__(self, lengths: DraftLengthPolicy, width: int = 1, window: int = 1) -> None:
        self._lengths = lengths
        self._width = width
        self._window = window

    def attach(self, target: TargetModel, drafter: DrafterModel | None) -> None:
        """Looks at acceptance only."""

    def decide(self) -> Decision:
        return Decision(self._lengths.draft_length(), self._width, self._window)

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Round):
            self._lengths.observe_round(observation.drafted, observation.accepted)
        elif isinstance(observation, PlainStep):
            self._lengths.observe_plain(observation.tokens)

    def explained(self) -> Sequence[Explained]:
        return ()

    def close(self) -> None:
        """Shares nothing."""
