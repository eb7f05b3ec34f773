"""The rules for Prometheus as the object that its operator reads: `python -m tools.manifest_rules` writes it anew."""

from __future__ import annotations

import yaml

from tools.manifest import ROOT, Json

MONITORING = ROOT / "k8s" / "components" / "monitoring"
RULES = MONITORING / "rules" / "outrider.yaml"
PROMETHEUS_RULE = MONITORING / "prometheus-rule.yaml"
_HEAD = """\
# Made from rules/outrider.yaml, which is the file to change: `PYTHONPATH=tests python -m tools.manifest_rules`.
"""


def prometheus_rule() -> Json:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "outrider"},
        "spec": yaml.safe_load(RULES.read_text()),
    }


if __name__ == "__main__":
    PROMETHEUS_RULE.write_text(_HEAD + yaml.safe_dump(prometheus_rule(), sort_keys=False, width=118))
