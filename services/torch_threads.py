"""How torch's threads wait for each other: a moment awake, then asleep. Read once, when torch is imported.

A forward of few rows is hundreds of short parallel loops, and waking a sleeping thread costs 0.1 ms: as much as many of
these loops. So a thread stays awake for about as long as it takes to wake one. Longer would gain a little more on cores
that nobody else wants, and lose a multiple where somebody does (decision 0011).
"""

from __future__ import annotations

from collections.abc import MutableMapping

AWAKE = "2000"
"""Turns of libgomp's waiting loop."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Sets the variables. `GOMP_SPINCOUNT` is kept where it is set; libgomp then minds no policy."""
    environment["OMP_WAIT_POLICY"] = "passive"
    environment.setdefault("GOMP_SPINCOUNT", AWAKE)
