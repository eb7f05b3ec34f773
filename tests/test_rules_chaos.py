"""Everything at once: whatever happens to workers and links, each stream is whole, right and ends once (kinds 2 to 24).

Acts come at random times, so no two runs are the same; the promise holds for all of them.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from scheduler.config import Policy
from scheduler.request import GenerationRequest
from specdec.drafter import Drafter
from specdec.drafters.model import ModelDrafter
from tools.cases import SAMPLED, expected, prompts
from tools.continuations import LawContinuation
from tools.deployment import Deployment, DraftSpec, quick_config
from tools.history import History, Terminal
from tools.meddling import MEDDLES
from tools.scripted import RandomTree, ScriptedDrafter, WrongFrom
from tools.table_drafter import AgreeingLaw, TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(order=1000)
ACTS = 60


def small_model() -> TableModel:
    """Holds a few sequences only, and is slow enough that acts come in the middle of things."""
    return TableModel(LAW, blocks_total=150, delay=0.002)


class Saboteur:
    """Kills, freezes, cuts, delays and forges; in the end puts everything back in order."""

    def __init__(self, system: Deployment, rng: random.Random) -> None:
        self._system = system
        self._rng = rng
        self._endpoints = list(system.network.endpoints.values())

    async def work(self) -> None:
        for _ in range(ACTS):
            await asyncio.sleep(self._rng.random() * 0.05)
            self._act()
        self._recover()

    def _act(self) -> None:
        endpoint = self._rng.choice(self._endpoints)
        match self._rng.choice(["cut", "kill", "restart", "freeze", "thaw", "delay", "meddle"]):
            case "cut":
                endpoint.cut()
            case "kill":
                endpoint.kill()
            case "restart":
                self._restart()
            case "freeze":
                endpoint.freeze()
            case "thaw":
                endpoint.thaw()
            case "delay":
                endpoint.delay = self._rng.choice([0.0, 0.05 * self._rng.random()])
            case "meddle":
                self._rng.choice(self._system.drafts).meddle = MEDDLES[self._rng.choice(sorted(MEDDLES))]()

    def _recover(self) -> None:
        for endpoint in self._endpoints:
            endpoint.thaw()
            endpoint.delay = 0.0
        self._restart()

    def _restart(self) -> None:
        """Another process at the address of each dead one."""
        for target in self._system.targets:
            if not target.reachable:
                model = small_model()
                self._system.models.append(model)
                target.replace(self._system.new_target_worker(model, target.address))
        for draft in self._system.drafts:
            if not draft.reachable:
                spec = DraftSpec(TableDrafter(LAW, 0.6))
                draft.replace(self._system.new_draft_worker(spec, draft.address))


@pytest.mark.parametrize("policy", list(Policy))
async def test_whatever_happens_each_stream_is_whole_right_and_ends_once(policy: Policy) -> None:
    rng = random.Random()
    config = replace(
        quick_config(rng.choice([1, 3, 6]), policy, rng.choice([1, 3])),
        round_timeout=0.3,
        draft_timeout=0.1,
        min_draft_patience=0.01,
        grant_tokens=rng.choice([2, 8, 64]),
        admission_timeout=30.0,
        probe_after_tokens=6,
        acceptance_window=4,
    )
    drafters: list[Drafter] = [
        ScriptedDrafter(RandomTree(3, 64), LawContinuation(LAW)),
        ModelDrafter(TableModel(AgreeingLaw(LAW, 0.7))),
        ScriptedDrafter(WrongFrom(1, 64), LawContinuation(LAW)),
    ]
    requests = [GenerationRequest(p[:20], SAMPLED, max_tokens=rng.randint(1, 120)) for p in prompts(20)]
    history = History()
    async with Deployment([small_model() for _ in range(3)], drafters, config) as system:

        async def client(name: str, request: GenerationRequest) -> None:
            history.expect(name, expected(LAW, request).token_ids)
            await asyncio.sleep(rng.random())
            await history.record(name, system.scheduler.generate(request))

        clients = [client(str(i), request) for i, request in enumerate(requests)]
        async with asyncio.timeout(60):
            await asyncio.gather(Saboteur(system, rng).work(), *clients)
        await system.idle()
        assert system.recorder.records == {}
    assert history.violations() == []
    ends = [(name, request.ends[0]) for name, request in history.requests.items()]
    assert [(name, end.detail) for name, end in ends if end.terminal is not Terminal.FINISHED] == []
