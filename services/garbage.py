"""How often Python looks for cycles of objects that nobody holds.

Rounds make many small objects and hardly a cycle: reference counts free them. So looking after every 700 of them, as
is the default, finds nothing and costs a tenth of the scheduler's time.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Made and not yet freed, before a look at them."""


def start_is_over() -> None:
    """What is there now stays to the end: it is looked at once more, and then no longer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
