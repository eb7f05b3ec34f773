"""Dashboards and alerts against a real Prometheus: what they show moves under load, and faults are seen."""

from __future__ import annotations

import asyncio
import math
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from draft_worker import counters as draft
from draft_worker.config import DraftConfig
from scheduler import counters as scheduler
from scheduler.audit import AuditConfig
from scheduler.errors import SequenceFailed
from scheduler.request import GenerationRequest, Started, Tokens
from services.links import GrpcDraftLink
from services.telemetry.metrics_dashboards import queries
from services.telemetry.metrics_exposition import prometheus_name
from services.telemetry.metrics_panels import DASHBOARDS
from specdec.log import Log
from specdec.messages import DraftAdvance, DraftItem, DraftOpen, DraftPlan, Epoch, Header, Role
from specdec.metric import Metric
from specdec.params import SamplingParams, StopConditions
from target_worker import counters as target
from target_worker.config import TargetConfig
from tools.cases import GREEDY, prompts
from tools.continuations import LawContinuation
from tools.deployment import quick_config
from tools.exposition import value
from tools.monitored import Monitored
from tools.process import SECRET
from tools.prometheus import Prometheus, Series, needs_prometheus
from tools.scripted import FailingDrafter, RandomTree, ScriptedDrafter, WrongFrom
from tools.table_law import TableLaw
from tools.table_model import Fault, FaultKind, TableModel
from tools.waiting import until

RULES = Path(__file__).parents[1] / "k8s" / "components" / "monitoring" / "rules" / "outrider.yaml"
ALERT_TESTS = Path(__file__).parent / "data" / "alerts.yaml"
LAW = TableLaw()
VOCABULARY = LAW.vocabulary_size
MARKER = 9
SEQUENCES = 12

FAULTS: dict[Metric, str] = {
    scheduler.REQUEST_ERRORS: "a row of NaN",
    scheduler.FAILOVERS: "streams to the target are cut",
    scheduler.LOST_STREAMS: "streams to the target are cut",
    scheduler.REQUESTS_WAITING: "no target can be reached",
    scheduler.FALLBACK: "the drafter raises",
    scheduler.AUDIT_MISMATCHES: "the target's law changes within an answer",
    target.PREEMPTIONS: "more sequences than KV has room for",
    target.FAILED_SEQUENCES: "a row of NaN",
    target.REFUSED_ITEMS: "more sequences than the target may open",
    draft.DRAFT_STALE: "a message with another digest",
    draft.DRAFT_REFUSED_ITEMS: "a message under an old epoch",
}
"""What must stay 0 while nothing is wrong, and the fault that moves it; each is tried below."""

STANDING: dict[Metric, str] = {
    scheduler.WORKERS: "no target can be reached",
    scheduler.METADATA_UP: "Redis is down",
    target.KV_BLOCKS: "the total never changes",
}
"""What has values that load does not change, and what changes them."""

ELSEWHERE: dict[Metric, str] = {scheduler.DRAFT_LINK_TIME: "only blocks that are waited for tell it"}
"""Shown without draft-ahead alone."""

SEEN_LIVE = {
    "OutriderErrorBudgetBurnsFast",
    "OutriderErrorBudgetBurnsSlowly",
    "OutriderNoTarget",
    "OutriderQueueGrows",
    "OutriderAcceptanceCollapsed",
    "OutriderDraftersFail",
    "OutriderAuditMismatch",
    "OutriderStreamsBreak",
    "OutriderSequencesFail",
    "OutriderMetadataDown",
}
"""Alerts that the faults below raise; the others need minutes of load and are tried by `promtool test rules`."""


def request(prompt: Sequence[int], max_tokens: int = 40) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), GREEDY, max_tokens=max_tokens)


class Plant:
    """The deployment under test, with what its faults are planted in."""

    def __init__(self, window: int = 2) -> None:
        continuation = LawContinuation(LAW)
        self.model = TableModel(LAW, blocks_total=SEQUENCES * 30, delay=0.002)
        self.drafter = FailingDrafter(ScriptedDrafter(RandomTree(2, VOCABULARY), continuation))
        self.drafter.failing = False
        wrong = ScriptedDrafter(WrongFrom(0, VOCABULARY), continuation)
        self.system = Monitored(
            [self.model],
            [("scripted", self.drafter), ("wrong", wrong)],
            replace(quick_config(4, width=2), window=window, fan_out=2, admission_timeout=60.0),
            TargetConfig("target", SECRET, max_sequences=2 * SEQUENCES),
            DraftConfig("draft", SECRET),
            AuditConfig(share=1.0),
        )

    async def load(self, count: int, max_tokens: int = 40, rounds: int = 2) -> None:
        """So many requests at once; the second round finds the prompts of the first."""
        for _ in range(rounds):
            asked = [request([1, 2, 3, 4, 5, 6, 7, 8, *prompt], max_tokens) for prompt in prompts(count)]
            await asyncio.gather(*(self.system.generate(one) for one in asked))

    async def load_seen_by(self, seen: Prometheus) -> None:
        """Until it was scraped twice, so that what is new has grown between two scrapes too."""

        async def scraped_twice() -> None:
            await seen.scraped()
            await seen.scraped()

        scraped = asyncio.create_task(scraped_twice())
        while not scraped.done():
            await self.load(SEQUENCES, rounds=1)
        await scraped

    async def fail_rows(self) -> None:
        self.model.faults = [Fault(FaultKind.NAN, MARKER)]
        asked = [self.system.generate(request((MARKER, i))) for i in range(60)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, SequenceFailed) for error in failed)
        self.model.faults = []

    async def overload(self) -> None:
        await self.load(3 * SEQUENCES, 60, rounds=1)

    async def fail_drafts(self) -> None:
        self.drafter.failing = True
        await self.load(2)
        self.drafter.failing = False

    async def mislead(self) -> None:
        """The drafter of which nothing is accepted gets all sequences."""
        self.system.scheduler.remove_worker(self.system.drafts[0].address)
        self.system.scheduler.add_worker(Role.DRAFT, self.system.drafts[1].address)
        await until(self.system.settled, "the other drafter is ready")

    async def change_the_law(self) -> None:
        async for event in self.system.scheduler.generate(request((1, 2, 3))):
            if isinstance(event, Tokens):
                self.model.law = TableLaw(salt="another")
        await until(lambda: self.system.mismatches > 0, "the audit found it")
        self.model.law = LAW

    async def cut_streams(self) -> None:
        for _ in range(4):
            async for event in self.system.scheduler.generate(request((1, 2, 3))):
                if isinstance(event, Started):
                    await self.system.targets[0].reset()
            await until(self.system.settled, "it is connected again")

    async def hide_the_target(self, seen: Prometheus) -> None:
        proxy = self.system.targets[0]
        proxy.refuse()
        await proxy.reset()
        waiting = asyncio.create_task(self.load(3, 4, rounds=1))
        await until(lambda: not self.system.scheduler.ready, "no target is ready")
        self.system.metadata_state = "down"
        await seen.scraped()
        self.hidden = {sample.labels["alertname"] for sample in await seen.query("ALERTS")}
        self.system.metadata_state = "connected"
        proxy.refuse(False)
        await waiting

    async def confuse_the_drafter(self) -> None:
        """A message that names another log, and one of an owner that has lost the sequence."""
        log = Log(bytes(16), (1, 2, 3), SECRET)
        epoch, old = Epoch(2, "owner"), Epoch(1, "owner")
        opened = DraftOpen((1, 2, 3), SamplingParams(), StopConditions(3, 20), DraftPlan(0), bytes(16))
        link = GrpcDraftLink(self.system.drafts[0].address)
        await link.open(lambda results: None, lambda cause: None)
        link.send(
            [
                DraftItem(Header("s", epoch, 3, log.digest), opened),
                DraftItem(Header("s", epoch, 3, bytes(16)), DraftAdvance((4,), DraftPlan(0))),
                DraftItem(Header("s", old, 3, log.digest), DraftAdvance((4,), DraftPlan(0))),
            ]
        )
        await link.close()


def in_prometheus(expr: str) -> str:
    """As Grafana would ask."""
    return expr.replace("$__rate_interval", "3s").replace("$namespace", ".*")


def alerts() -> set[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}


def named(expr: str, metrics: Iterable[Metric]) -> list[Metric]:
    return [metric for metric in metrics if f"{prometheus_name(metric)}{{" in expr]


def finite(series: Series) -> Series:
    """Without what is no number: 0/0, and quantiles of nothing."""
    kept = {labels: [value for value in values if math.isfinite(value)] for labels, values in series.items()}
    return {labels: values for labels, values in kept.items() if values}


def moved(before: Series, after: Series) -> bool:
    """Some series is new, or has values that it did not have before the load."""
    return any(set(values) - set(before.get(labels, [])) for labels, values in after.items())


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Plant, Prometheus]]:
    plant = Plant()
    async with plant.system as system, Prometheus(system.urls, [RULES]) as seen:
        yield plant, seen


@needs_prometheus
async def test_every_query_moves_under_load_and_faults_are_seen() -> None:
    every = [query for dashboard in DASHBOARDS for query in queries(dashboard)]
    async with watched() as (plant, seen):
        before = {expr: finite(await seen.history(in_prometheus(expr))) for _, expr in every}
        await plant.load_seen_by(seen)
        await until(lambda: plant.system.audited >= 4, "answers were audited")
        await seen.scraped()
        for title, expr in [query for query in every if not named(query[1], ELSEWHERE)]:
            values = finite(await seen.history(in_prometheus(expr)))
            assert values, f"{title}: no series for {expr}"
            if named(expr, FAULTS):
                assert not any(map(any, values.values())), f"{title}: moved although nothing was wrong: {expr}"
            elif not named(expr, STANDING):
                assert moved(before[expr], values), f"{title}: did not move: {expr}"
        assert await seen.query("ALERTS") == []

        for fault in (
            plant.fail_rows,
            plant.overload,
            plant.fail_drafts,
            plant.change_the_law,
            plant.cut_streams,
            plant.confuse_the_drafter,
        ):
            await fault()
        await plant.hide_the_target(seen)
        await plant.mislead()
        await plant.load_seen_by(seen)
        await seen.scraped()
        for title, expr in every:
            if named(expr, FAULTS):
                values = finite(await seen.history(in_prometheus(expr)))
                assert any(map(any, values.values())), f"{title}: no fault moved {expr}"
        raised = plant.hidden | {sample.labels["alertname"] for sample in await seen.query("ALERTS")}
        states = await seen.history('sum by (state) (outrider_workers{role="target"})')

    assert raised >= SEEN_LIVE
    assert any(states[("state", "lost"),])


@needs_prometheus
def test_promtool_finds_nothing_to_say_about_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", "--lint-fatal", RULES], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tests = yaml.safe_load(ALERT_TESTS.read_text())
    file = tmp_path / "alerts.yaml"
    file.write_text(yaml.safe_dump({**tests, "rule_files": [str(RULES)]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    tried = {(one["alertname"], bool(one["exp_alerts"])) for test in tests["tests"] for one in test["alert_rule_test"]}
    assert tried == {(name, fires) for name in alerts() for fires in (True, False)}


@needs_prometheus
async def test_promtool_finds_nothing_to_say_about_the_metrics() -> None:
    plant = Plant(window=1)
    async with plant.system as system:
        await plant.load(2)
        assert value(system.metrics, scheduler.DRAFT_LINK_TIME) > 0
        texts = [await system.shown(name) for name in ("scheduler", "target-0", "draft-0")]
    pipe = asyncio.subprocess.PIPE
    for text in texts:
        promtool = await asyncio.create_subprocess_exec(
            "promtool", "check", "metrics", stdin=pipe, stdout=pipe, stderr=pipe
        )
        said = await promtool.communicate(text.encode())
        assert (promtool.returncode, *said) == (0, b"", b"")
