"""How torch's threads wait for each other: a moment awake, then asleep. Read once, when torch is imported.

A forward of few rows is hundreds of short parallel loops, and waking a sleeping thread costs 0.1 ms: as much as many of
these loops. So a thread stays awake for about as long as it takes to wake one. Longer would gain a little more on cores
that nobody else wants, and lose a multiple where somebody does (decision 0011).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

AWAKE = "2000"
"""Turns of libgomp's waiting loop."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Sets the variables. `GOMP_SPINCOUNT` is kept where it is set; libgomp then minds no policy."""
    environment["OMP_WAIT_POLICY"] = "passive"
    environment.setdefault("GOMP_SPINCOUNT", AWAKE)


def in_passing_thread(run: Callable[[], Result]) -> Result:
    """`run()`, whatever it raises, in a thread that ends with it.

    Each thread that computes has helpers of its own, which last as long as it does. While a process has more of them
    than cores, none stays awake at all: so a model is not loaded by a thread that lives on and never computes again.
    A Ctrl-C does not wait for `run`.
    """
    future: Future[Result] = Future()

    def target() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=target, daemon=True, name="passing").start()
    return future.result()
