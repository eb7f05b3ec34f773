"""A real Prometheus (Debian's package `prometheus`) that scrapes what a test serves."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
import pytest
import yaml

from tools.ports import free_port
from tools.waiting import until

INTERVAL = 0.25
"""Seconds between scrapes, and between evaluations of rules."""

needs_prometheus = pytest.mark.skipif(
    not os.environ.get("CI") and shutil.which("prometheus") is None,
    reason="no prometheus and promtool on PATH: apt install prometheus",
)
"""Continuous integration installs it, so there nothing is skipped."""


Series = dict[tuple[tuple[str, str], ...], list[float]]
"""Values over time, by the labels of the series."""


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


class Prometheus:
    """Async context manager. jobs: URL of the metrics by the job's name."""

    def __init__(self, jobs: Mapping[str, str], rules: Sequence[Path] = ()) -> None:
        self._jobs = dict(jobs)
        self._rules = list(rules)
        self._folder = Path(tempfile.mkdtemp(prefix="ot-prometheus-", dir="/tmp"))
        self._exits = AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None
        self.started_at = time.time()

    async def __aenter__(self) -> Prometheus:
        address = f"127.0.0.1:{free_port()}"
        config = self._folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(self._config()))
        with (self._folder / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
                stdout=log,
                stderr=log,
            )
        client = httpx2.AsyncClient(base_url=f"http://{address}", timeout=10, trust_env=False)
        self._client = await self._exits.enter_async_context(client)
        try:
            await until(self._answers, "Prometheus is ready")
            await self.scraped()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def query(self, expr: str) -> list[Sample]:
        """Its value now, by series. Raises RuntimeError with what Prometheus says of a wrong expression."""
        result = await self._ask("query", query=expr)
        if result["resultType"] == "scalar":
            return [Sample({}, float(result["result"][1]))]
        return [Sample(series["metric"], float(series["value"][1])) for series in result["result"]]

    async def history(self, expr: str) -> Series:
        """By series, all its values since the start."""
        result = await self._ask("query_range", query=expr, start=self.started_at, end=time.time(), step=INTERVAL)
        return {
            tuple(sorted(series["metric"].items())): [float(value) for _, value in series["values"]]
            for series in result["result"]
        }

    async def scraped(self) -> None:
        """Until every job was scraped, and every rule evaluated, after this moment."""
        after = time.time()

        async def done() -> bool:
            up = await self.query(f"(up == 1) and (timestamp(up) > {after})")
            return len(up) == len(self._jobs)

        await until(done, "every job was scraped")
        await asyncio.sleep(2 * INTERVAL)  # for an evaluation, which tells nobody when it is done

    async def _ask(self, path: str, **parameters: str | float) -> dict[str, Any]:
        answer = (await self._client.get(f"/api/v1/{path}", params=parameters)).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{parameters['query']}: {answer['error']}")
        data: dict[str, Any] = answer["data"]
        return data

    async def _answers(self) -> bool:
        try:
            return (await self._client.get("/-/ready")).status_code == 200
        except httpx2.TransportError:
            return False

    def _config(self) -> dict[str, object]:
        scrapes = [
            {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://").removesuffix("/metrics")]}]}
            for job, url in self._jobs.items()
        ]
        pace = f"{round(INTERVAL * 1000)}ms"
        return {
            "global": {"scrape_interval": pace, "scrape_timeout": pace, "evaluation_interval": pace},
            "rule_files": [str(path) for path in self._rules],
            "scrape_configs": scrapes,
        }

    async def _close(self) -> None:
        await self._exits.aclose()
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
