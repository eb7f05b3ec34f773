"""Ray itself: one of our own on this machine, or a cluster that is there already."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray

from services.start_error import StartError

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray takes no less than 75 MiB. What passes through it are log lines."""
WRONG_TOKEN = (
    "the cluster at {address} refuses this Ray token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that of its head"
)
REFUSED = "InvalidAuthToken"

Result = TypeVar("Result")


class RayCluster:
    """The connection of this process to Ray; there can be one at a time."""

    def __init__(self, address: str | None, folder: Path) -> None:
        """address: None starts Ray here, with its files in `folder`. `close` ends what was started."""
        self._address = address
        self._folder = folder
        # Ray's own processes die with the thread that started them, so this one lives as long as they.
        self._thread = ThreadPoolExecutor(1, "ray")

    async def connect(self) -> None:
        """Takes some seconds. Raises StartError."""
        try:
            await self._in_thread(self._connect)
        finally:
            _take_back_signals()

    async def close(self) -> None:
        await self._in_thread(ray.shutdown)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": "error"}
        if self._address is None:
            options |= {
                "num_cpus": os.cpu_count(),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(self._folder / "ray"),
            }
        try:
            ray.init(self._address or "local", **options)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            if _is_about_token(error):
                raise StartError(WRONG_TOKEN.format(address=self._address)) from error
            where = f"reach Ray at {self._address}" if self._address else "start Ray"
            raise StartError(f"cannot {where}: {str(error).strip().partition(chr(10))[0]}") from error


def _take_back_signals() -> None:
    """Ray's core takes SIGTERM for a crash: it prints a stack, and aborts if the process still lives 3 s later."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.siginterrupt(signal.SIGTERM, False)  # as asyncio wants it


def _is_about_token(error: BaseException) -> bool:
    """Ray tells of a refused token only in what its error was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ray.exceptions.AuthenticationError) or REFUSED in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
