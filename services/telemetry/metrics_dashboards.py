"""The Grafana dashboards as files: `python -m services.telemetry.metrics_dashboards`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.telemetry.metrics_panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parents[2] / "k8s" / "components" / "monitoring" / "dashboards"
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


def queries(dashboard: Dashboard) -> Iterator[tuple[str, str]]:
    """Panel title and expression of each query."""
    for panel in dashboard.panels:
        for query in panel.queries:
            yield panel.title, query.expr


def rendered(dashboard: Dashboard) -> str:
    """As Grafana imports it."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["outrider"],
        "editable": True,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _namespace()]},
        "panels": [_panel(index, panel) for index, panel in enumerate(dashboard.panels)],
    }
    return json.dumps(document, indent=2) + "\n"


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, _PER_ROW)
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query.expr, "legendFormat": query.legend, "datasource": source}
            for i, query in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _namespace() -> dict[str, Any]:
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": "label_values(outrider_build_info, namespace)",
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def main() -> None:
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.uid}.json").write_text(rendered(dashboard))


if __name__ == "__main__":
    main()
