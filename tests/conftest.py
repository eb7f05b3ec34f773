"""What every test shares: threads set before torch is imported, the real model, and its marker."""

from __future__ import annotations

import os

# Read once, when torch is imported: a spinning test runner would starve the workers that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")
# The core's own lines would mix with what a test reads from stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools.short_folder import short_folder

if TYPE_CHECKING:
    from tools.lanes import Lanes

SMOLLM2 = "smollm2-135m"
SLOW_SECONDS = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", type=Path, metavar="DIR", help="prompts of slow tests, default ../shared/data")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    """Who runs what with `-n`. A hook of pytest-xdist, which may be absent or off."""
    from tools.lanes import Lanes

    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the real model is marked so: `-m "not model"` then needs no download. And what is slow has more
    time than the rest, so that a busy machine fails no test of it."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker("model")
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetches the real model before the first test, so that no test's timeout pays for a slow network."""
    if not session.config.option.collectonly and any(item.get_closest_marker("model") for item in session.items):
        from services import models

        models.fetch(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, fetched and converted where it was absent (93 MB, about half a minute)."""
    from services import models

    return models.fetch(SMOLLM2)


@pytest.fixture(name="short_folder")
def short_folder_fixture() -> Iterator[Path]:
    """For Unix sockets."""
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def data(request: pytest.FixtureRequest) -> Path:
    """Folder of public prompts that only slow tests read; it may be absent."""
    given: Path | None = request.config.getoption("--data")
    return given or Path(__file__).resolve().parents[2] / "shared" / "data"
