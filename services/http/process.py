"""The HTTP API as a part of the scheduler process."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway import Gateway
from services.http.app import HttpConfig, RenderMetrics, make_app
from services.http.server import HttpServer
from services.http.ui_routes import UiRoutes
from services.server import TlsFiles
from services.settings import SchedulerSettings
from services.telemetry.tracing_calls import Calls


def http_server(
    settings: SchedulerSettings,
    gateway: Gateway,
    ready: Callable[[], bool],
    render_metrics: RenderMetrics | None = None,
    ui: UiRoutes | None = None,
    calls: Calls | None = None,
) -> HttpServer:
    config = HttpConfig(settings.api_keys, settings.cors_origins, settings.max_request_bytes)
    app = make_app(gateway, config, ready=ready, render_metrics=render_metrics, ui=ui, calls=calls)
    tls = TlsFiles(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
    return HttpServer(app, settings.http_host, settings.http_port, tls)
