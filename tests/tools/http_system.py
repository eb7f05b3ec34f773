"""Whole systems of table models behind the HTTP API, with chat templates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from openai import AsyncOpenAI

from services.http.app import HttpConfig
from specdec.drafter import Drafter
from specdec.messages import TokenizerBundle
from tools.deployment import Deployment, quick_config
from tools.grammar_system import GrammarDeployment, MaskedContinuation, table_model
from tools.grammar_vocabulary import PLACEHOLDERS, SPECIAL, STOP, TOKENS, VOCABULARY, byte_level_json
from tools.identities import tokenizer_bundle
from tools.scripted import Script, ScriptedDrafter
from tools.served_http import openai_client, served_http
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.tool_template import TOOL_TEMPLATE

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


@asynccontextmanager
async def structured_system(script: Script) -> AsyncIterator[tuple[str, GrammarDeployment]]:
    """URL and system, of a model that writes bytes and pieces of JSON, takes tools, and is held to grammars."""
    drafter = ScriptedDrafter(script, MaskedContinuation())
    async with GrammarDeployment([table_model()], [drafter], quick_config(5)) as system:
        tokenizer_json = byte_level_json(TOKENS, SPECIAL, PLACEHOLDERS)
        bundle = TokenizerBundle("table", tokenizer_json, TOOL_TEMPLATE, None, (STOP,), 4096, VOCABULARY)
        system.targets[0].bundle = bundle
        async with served_http(system.scheduler) as url:
            yield url, system
        await system.idle()
