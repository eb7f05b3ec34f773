"""A port that is free, and stays so until a test takes it."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Below those that a kernel gives out by itself, to whoever connects or listens without a wish."""


def free_port() -> int:
    """Of 127.0.0.1. Raises OSError if none of a hundred is free."""
    for port in random.Random().sample(range(LOWEST, HIGHEST), 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError("no free port was found")
