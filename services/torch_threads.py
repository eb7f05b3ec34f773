"""How torch's threads wait for each other: a moment awake, then asleep. Read once, when torch is imported.

A forward of few rows is hundreds of short parallel loops, and waking a sleeping thread costs 0.1 ms: as much as many of
these loops. So a thread stays awake for some 0.2 ms, which is longer than what lies between two loops of one forward.
Only where forwards do not run side by side on the same cores (`cpu_turns`), or have cores enough (decision 0011).
"""

from __future__ import annotations

from collections.abc import MutableMapping

AWAKE = "10000"
"""Turns of libgomp's waiting loop."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Sets the variables. `GOMP_SPINCOUNT` is kept where it is set; libgomp then minds no policy."""
    environment["OMP_WAIT_POLICY"] = "passive"
    environment.setdefault("GOMP_SPINCOUNT", AWAKE)
