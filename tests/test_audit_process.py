"""The audit and the metrics of a whole deployment of processes: settings, margins on the wire, and `/metrics`."""

from __future__ import annotations

import time
from urllib.request import ProxyHandler, build_opener

from tools.up import Up, outrider
from tools.waiting import PATIENCE


def test_a_deployment_audits_its_answers_and_shows_what_it_counted() -> None:
    with Up(
        OUTRIDER_SCHEDULER_AUDIT_SHARE="1",
        OUTRIDER_SCHEDULER_AUDIT_LOG_CONTENT="true",
        OUTRIDER_SCHEDULER_POLICY="fixed",
    ) as up:
        address = up.wait_ready()
        for flags in (("--temperature", "0"), ("--seed", "7"), ("--speculation", "off")):
            done = outrider("generate", "w1 w2 w3", "--max-tokens", "20", "--address", address, *flags)
            assert done.returncode == 0, done.stderr
        shown = until_shown(up, "outrider_audits_total", 'outcome="equal"', 3)
        up.process.terminate()
        up.end()

    assert shown["outrider_generation_tokens_total"] == 60
    assert total(shown, "outrider_spec_decode_num_drafts_total") > 0
    assert shown["outrider_spec_decode_audit_mismatches_total"] == 0
    assert total(shown, "gen_ai_server_request_duration_seconds_count") == 3
    assert not any("differs from plain decoding" in line for line in up.lines)


def total(shown: dict[str, float], name: str) -> float:
    """Over all labels."""
    return sum(value for sample, value in shown.items() if sample.partition("{")[0] == name)


def until_shown(up: Up, name: str, label: str, expected: float) -> dict[str, float]:
    """What `/metrics` shows once that sample has the value. Raises TimeoutError."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        shown = scrape(up)
        if shown[f"{name}{{{label}}}"] == expected:
            return shown
        time.sleep(0.05)
    raise TimeoutError(f"{name} is not {expected}: {shown}")


def scrape(up: Up) -> dict[str, float]:
    url = up.base_url.removesuffix("/v1") + "/metrics"
    with build_opener(ProxyHandler({})).open(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(number) for name, number in pairs}
