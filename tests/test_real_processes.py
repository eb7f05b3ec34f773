"""SmolLM2 in worker processes over sockets: killed and frozen ones cost time, never a token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scheduler.request import Finished, GenerationRequest, Speculation, SpeculationSummary, Started, Tokens
from services.channel import ChannelConfig
from services.links import LinkConfig
from specdec.params import SamplingParams
from tools.cases import GREEDY
from tools.deployment import SystemUnderTest, quick_config
from tools.history import History, RequestHistory
from tools.real_prompts import own_prompts
from tools.real_system import RealTarget, real_runner
from tools.socket_deployment import SocketDeployment, WorkerProcess
from tools.waiting import until

pytestmark = pytest.mark.timeout(180)

TOKENS = 32
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=20_260_731)
CONFIG = replace(
    quick_config(), round_timeout=60.0, draft_timeout=60.0, min_draft_patience=60.0, admission_timeout=60.0
)

Act = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    request: GenerationRequest
    reference: list[int]


@pytest.fixture(scope="module")
def cases(smollm2: Path) -> dict[str, Case]:
    """One greedy and one drawn request, and what the model says to each in this process, plainly."""
    prompts = {prompt.name: prompt.token_ids for prompt in own_prompts(smollm2)}
    requests = {
        "greedy": GenerationRequest(prompts["code"], GREEDY, max_tokens=TOKENS),
        "sampled": GenerationRequest(prompts["chat"], SAMPLED, max_tokens=TOKENS),
    }
    return asyncio.run(_plain(smollm2, requests))


async def _plain(folder: Path, requests: dict[str, GenerationRequest]) -> dict[str, Case]:
    async with RealTarget(real_runner(folder, "bf16")) as target:
        system = await target.system()
        answers = await asyncio.gather(*(system.plain(request) for request in requests.values()))
        pairs = zip(requests.items(), answers, strict=True)
        return {name: Case(request, answer.token_ids) for (name, request), answer in pairs}


async def _half_way(
    system: SystemUnderTest, request: GenerationRequest, history: RequestHistory, act: Act
) -> SpeculationSummary:
    """Runs the request, and acts once as soon as half of its tokens have come."""
    summary: SpeculationSummary | None = None
    acted = False
    async for event in system.scheduler.generate(request):
        history.see(event)
        match event:
            case Tokens() if not acted and event.position + len(event.token_ids) >= TOKENS // 2:
                acted = True
                await act()
            case Finished():
                summary = event.speculation
            case Tokens() | Started():
                pass
    assert acted
    assert summary is not None
    return summary


def _holder(system: SocketDeployment) -> WorkerProcess:
    """The target process of the only running sequence."""
    [record] = system.scheduler.sequences()
    return system.targets[int(record.target_worker.removeprefix("target-"))]


@pytest.mark.slow  # with table models: tests/test_rules_sockets.py
async def test_a_draft_worker_killed_half_way_changes_no_draw(
    smollm2: Path, cases: dict[str, Case], tmp_path: Path
) -> None:
    case, history = cases["sampled"], History()
    outputs = tmp_path / "outputs.json"
    outputs.write_text(json.dumps([[case.request.token_ids, case.reference]]))
    # Half right: rounds stay short, so that half way lies in the middle of many.
    draft = f"scripted_draft --script half:1 --outputs {outputs} --vocabulary-size 49152"
    async with SocketDeployment([f"real_target --model {smollm2}"], [draft], CONFIG) as system:
        history.expect("killed", case.reference)
        summary = await _half_way(system, case.request, history.request("killed"), system.drafts[0].kill)
        history.expect("undrafted", case.reference)
        await system.generate(replace(case.request, speculation=Speculation.OFF), history.request("undrafted"))
    assert history.violations() == []
    assert summary.mode == "mixed"
    assert summary.num_drafts >= 5
    assert summary.num_plain_steps >= TOKENS // 3
    assert summary.fallbacks == {"failed": 1}


async def test_a_target_frozen_or_killed_half_way_changes_no_token(smollm2: Path, cases: dict[str, Case]) -> None:
    """Frozen first: its late results are refused once it wakes. Killed next. Both times the other one goes on."""
    history = History()
    config = replace(CONFIG, round_timeout=2.0)
    # The missed deadline of the round is to tell, not the unanswered ping: the stream stays and brings late results.
    links = LinkConfig(channel=ChannelConfig(keepalive_time=60.0, keepalive_timeout=60.0))
    async with SocketDeployment([f"real_target --model {smollm2}"] * 2, config=config, links=links) as system:

        async def freeze_until_taken_over() -> None:
            frozen = _holder(system)
            frozen.freeze()
            wakers.append(asyncio.create_task(_wake_once_taken_over(system, frozen)))

        async def kill() -> None:
            await _holder(system).kill()

        wakers: list[asyncio.Task[None]] = []
        for name, act in (("greedy", freeze_until_taken_over), ("sampled", kill)):
            history.expect(name, cases[name].reference)
            summary = await _half_way(system, cases[name].request, history.request(name), act)
            assert summary.num_failovers >= 1
        await asyncio.gather(*wakers)
        await until(lambda: system.scheduler.refused_results > 0, "late results were refused")
    assert history.violations() == []


async def _wake_once_taken_over(system: SocketDeployment, frozen: WorkerProcess) -> None:
    await until(lambda: any(s.epoch_number > 1 for s in system.scheduler.sequences()), "taken over", patience=60.0)
    frozen.thaw()
