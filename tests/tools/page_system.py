"""A whole system of table models with the page in front of it, and the control service for the terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from outrider.v1 import control_service_pb2_grpc as control_grpc
from scheduler.config import SchedulerConfig
from services import control_servicer
from services.control_servicer import SchedulerControlServicer
from services.gateway import Gateway
from services.http.app import HttpConfig, make_app
from services.http.server import HttpServer
from services.http.ui_events import StatusBoard
from services.http.ui_routes import UiRoutes
from services.rounds import RoundStore
from services.server import Server, ServerConfig
from specdec.drafter import Drafter
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.identities import tokenizer_bundle, tokenizer_json, words
from tools.scripted import Script, ScriptedDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw()
MARKUP = "<img/src=x/onerror=document.title='owned'>"
"""What token 7 spells: no blank in it, for the tokenizer takes text apart at blanks."""


@dataclass(frozen=True, slots=True)
class PageSystem:
    """url: of HTTP. address: of gRPC."""

    deployment: Deployment
    rounds: RoundStore
    url: str
    address: str


def scripted(script: Script) -> ScriptedDrafter:
    return ScriptedDrafter(script, LawContinuation(LAW))


async def leases() -> dict[str, float]:
    return {"target-0": 4.5}


@asynccontextmanager
async def page_system(
    drafters: Sequence[Drafter],
    config: SchedulerConfig | None = None,
    http: HttpConfig | None = None,
    delay: float = 0.004,
    spelled: Sequence[str] = (),
) -> AsyncIterator[PageSystem]:
    """spelled: what the tokens are, instead of w0, w1, ..."""
    rounds = RoundStore()
    model = TableModel(LAW, delay=delay)
    async with Deployment([model], drafters, config or quick_config(5), readers=[rounds.read]) as deployment:
        bundle = tokenizer_bundle(deployment.targets[0].worker.identity)
        vocabulary = tokenizer_json(spelled or words(model.vocabulary_size))
        deployment.targets[0].bundle = replace(bundle, tokenizer_json=vocabulary)
        gateway = Gateway(deployment.scheduler)
        ui = UiRoutes(gateway, rounds, StatusBoard(deployment.scheduler, rounds, leases))
        server = HttpServer(make_app(gateway, http, ui=ui), "127.0.0.1", 0)
        url = await server.start()
        control = Server(ServerConfig(("127.0.0.1:0",)))
        servicer = SchedulerControlServicer(deployment.scheduler, "0.1", rounds=rounds, leases=leases)
        control_grpc.add_ControlServiceServicer_to_server(servicer, control.grpc)
        (address,) = await control.start((control_servicer.SERVICE_NAME,))
        try:
            yield PageSystem(deployment, rounds, url, address)
        finally:
            rounds.close()
            await server.close(1)
            await control.drain(0)
