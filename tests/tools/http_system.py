"""A whole system of table models behind the HTTP API, with a chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from openai import AsyncOpenAI

from services.http.app import HttpConfig
from specdec.drafter import Drafter
from tools.deployment import Deployment
from tools.identities import tokenizer_bundle
from tools.served_http import openai_client, served_http
from tools.table_law import TableLaw
from tools.table_model import TableModel

TEMPLATE = (
    "{% if tools %}w9 {# <tool_call> #}{% endif %}{% for message in messages %}{{ message.content }} {% endfor %}"
)
STOP_TOKEN = 63


@asynccontextmanager
async def http_system(
    law: TableLaw, drafters: Sequence[Drafter] = (), config: HttpConfig | None = None, delay: float = 0.0
) -> AsyncIterator[tuple[AsyncOpenAI, Deployment, str]]:
    """Client, system, URL. Words are "w0" to "w63"; the last one ends an answer. In the end nothing may be left."""
    async with Deployment([TableModel(law, delay=delay)], drafters) as system:
        bundle = tokenizer_bundle(system.targets[0].worker.identity, (STOP_TOKEN,))
        system.targets[0].bundle = replace(bundle, chat_template=TEMPLATE)
        async with served_http(system.scheduler, config) as url, openai_client(url) as client:
            yield client, system, url
        await system.idle()
