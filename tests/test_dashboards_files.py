"""The files of dashboards and rules are those of the code, name metrics that exist, and every alert has its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.metrics import BUILD_INFO, ROLES
from services.telemetry.metrics_dashboards import FOLDER, rendered
from services.telemetry.metrics_exposition import prometheus_name
from services.telemetry.metrics_panels import DASHBOARDS, Dashboard
from specdec.metric import Kind

ROOT = Path(__file__).parents[1]
RULES = ROOT / "k8s" / "components" / "monitoring" / "rules" / "outrider.yaml"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def shown() -> set[str]:
    """Every name of a sample."""
    names = set()
    for metric in (*(metric for metrics in ROLES.values() for metric in metrics), BUILD_INFO):
        name = prometheus_name(metric)
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if metric.kind is Kind.HISTOGRAM else {name}
    return names


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_a_dashboard_is_that_of_the_code(dashboard: Dashboard) -> None:
    """`python -m services.telemetry.metrics_dashboards` makes it anew."""
    assert (FOLDER / f"{dashboard.uid}.json").read_text() == rendered(dashboard)
    assert {file.stem for file in FOLDER.glob("*.json")} == {dashboard.uid for dashboard in DASHBOARDS}


def test_every_metric_is_on_a_dashboard() -> None:
    text = "".join(json.dumps(json.loads(rendered(dashboard))) for dashboard in DASHBOARDS)
    missing = [metric.name for metrics in ROLES.values() for metric in metrics if prometheus_name(metric) not in text]

    assert missing == []


def test_rules_name_metrics_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for rule in rules() for name in re.findall(r"\b(?:outrider|gen_ai)_\w+", rule["expr"])}
    own = {part for name in recorded for part in re.findall(r"\b(?:outrider|gen_ai)_\w+", name)}

    assert used - own <= shown()
    assert used - own


def test_every_alert_has_a_section_of_the_runbook() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    sections = re.findall(r"^## (Outrider\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)

    assert len(sections) == len(alerts)
    assert set(sections) == {rule["alert"] for rule in alerts}
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
