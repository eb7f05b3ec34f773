"""The other ranks of a tensor-parallel target, as processes beside rank 0 that end with it.

Whoever starts the ranks with torchrun, on one machine or several, needs none of this: RANK is set then.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence

from services.child import Child, ChildSpec
from services.supervisor import describe_exit

log = logging.getLogger(__name__)

HOST = "127.0.0.1"


def start_ranks(count: int, device: str, command: Sequence[str]) -> None:
    """Runs `command` as the ranks 1 to `count` - 1, and makes this process rank 0. If one of them fails, this process
    ends too, so that all of them start anew."""
    if device == "cpu" and count > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would take the GPUs
    if count == 1 or "RANK" in os.environ:
        return
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": HOST, "MASTER_PORT": str(_free_port())}
    for rank in range(1, count):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        Child(ChildSpec(f"rank {rank}", tuple(command), environment), _show, _ended)
    os.environ.update({**common, "RANK": "0", "LOCAL_RANK": "0"})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _show(name: str, line: str) -> None:
    print(f"{name}: {line}", file=sys.stderr, flush=True)


def _ended(child: Child, code: int) -> None:
    """A rank that ends well does so because rank 0 did."""
    if code == 0:
        return
    complaint = f": {child.complaint}" if child.complaint else ""
    print(f"error: {child.spec.name} ended with {describe_exit(code)}{complaint}", file=sys.stderr, flush=True)
    os._exit(1)
