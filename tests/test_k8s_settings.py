"""Settings in a cluster: what Kubernetes makes up is passed over, a misspelt name refused, an address reachable."""

from __future__ import annotations

import os
import re

import pytest

from services.settings import DraftSettings, SchedulerSettings, SettingsError, TargetSettings, load
from services.settings.environment import NO_SETTINGS, is_service_link
from services.start_error import StartError
from services.worker_start import refuse_wildcard
from tools.manifest import ROOT
from tools.up import outrider

PACKAGES = ("outrider", "services", "scheduler", "specdec", "target_worker", "draft_worker")
SERVICE_LINKS = {
    "OUTRIDER_SCHEDULER_PORT": "tcp://10.96.0.7:50051",
    "OUTRIDER_SCHEDULER_SERVICE_HOST": "10.96.0.7",
    "OUTRIDER_SCHEDULER_SERVICE_PORT": "50051",
    "OUTRIDER_SCHEDULER_SERVICE_PORT_GRPC": "50051",
    "OUTRIDER_SCHEDULER_PORT_50051_TCP": "tcp://10.96.0.7:50051",
    "OUTRIDER_SCHEDULER_PORT_50051_TCP_PROTO": "tcp",
    "OUTRIDER_SCHEDULER_PORT_50051_TCP_PORT": "50051",
    "OUTRIDER_SCHEDULER_PORT_50051_TCP_ADDR": "10.96.0.7",
    # Of Services that happen to be called as a setting is.
    "OUTRIDER_GRPC_PORT": "tcp://10.96.0.8:50051",
    "OUTRIDER_PORT": "tcp://10.96.0.9:50051",
}


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OUTRIDER_"):
            monkeypatch.delenv(name)


def test_what_kubernetes_tells_of_services_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICE_LINKS.items():
        assert is_service_link(name, value)
        monkeypatch.setenv(name, value)
    loaded = load(SchedulerSettings)
    assert not loaded.given("grpc_port")
    monkeypatch.setenv("OUTRIDER_GRPC_PORT", "7")
    assert load(SchedulerSettings).settings.grpc_port == 7


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("OUTRIDER_TARGET_TREADS", "did you mean OUTRIDER_TARGET_THREADS?"),
        ("OUTRIDER_DRAFT_GRPC_HOST", "did you mean "),
        ("OUTRIDER_QQQQQQQQ", "`outrider config show` lists"),
        ("OUTRIDER_TARGET_", "did you mean "),
    ],
)
def test_a_misspelt_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    monkeypatch.setenv(name, "2")
    for kind in (TargetSettings, SchedulerSettings):
        with pytest.raises(SettingsError) as caught:
            load(kind)
        assert str(caught.value).startswith(f"{name} in the environment is no setting; ")
        assert hint in str(caught.value)


def test_variables_of_other_roles_and_of_other_programs_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_DRAFT_NGRAM_MAX", "OUTRIDER_TARGETS", "OUTRIDER_API_KEY", "OUTRIDER_HOME", "OUTRIDERS_X"):
        monkeypatch.setenv(name, "4")
    load(TargetSettings)


def test_every_variable_that_the_code_reads_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds one that is no setting adds it to NO_SETTINGS."""
    named: set[str] = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            named |= set(re.findall(r"[\"'$](OUTRIDER_[A-Z][A-Z_]*[A-Z])\b", file.read_text()))
    assert {f"OUTRIDER_{name}" for name in ("HOME", "CONFIG", "ADDRESS")} <= named
    for name in named:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("OUTRIDER_CONFIG")
    load(DraftSettings)
    assert {f"OUTRIDER_{name}" for name in NO_SETTINGS} <= named


REDIS = "redis://10.0.0.9:6379/0"


@pytest.mark.parametrize("listen", ["0.0.0.0:50061", "[::]:50061"])
@pytest.mark.parametrize("kind", [TargetSettings, DraftSettings])
def test_a_worker_does_not_announce_every_address(
    kind: type[TargetSettings] | type[DraftSettings], listen: str
) -> None:
    with pytest.raises(StartError, match=r"^listen is .*: give --advertise HOST:PORT"):
        refuse_wildcard(load(kind, None, {"listen": listen, "redis_url": REDIS}).settings)
    with pytest.raises(StartError, match=r"^advertise is "):
        flags = {"listen": "10.0.0.5:50061", "advertise": listen, "redis_url": REDIS}
        refuse_wildcard(load(kind, None, flags).settings)


@pytest.mark.parametrize(
    "flags",
    [
        {"listen": "0.0.0.0:50061", "advertise": "10.0.0.5:50061", "redis_url": REDIS},
        {"listen": "0.0.0.0:50061"},  # found by the scheduler's own list
        {"listen": "10.0.0.6:50062", "redis_url": REDIS},
        {"listen": "unix:/run/draft.sock", "redis_url": REDIS},
    ],
)
def test_an_address_that_can_be_reached_is_fine(flags: dict[str, str]) -> None:
    refuse_wildcard(load(DraftSettings, None, flags).settings)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_refusal_is_one_line_before_anything_is_loaded(role: str) -> None:
    done = outrider(role, "--listen", "0.0.0.0:0", "--redis-url", REDIS, "--allow-unauthenticated")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "give --advertise" in done.stderr
