"""The real worker loops behind real sockets, with table models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from services.links import GrpcDraftLink, GrpcTargetLink
from services.worker_process import serve_draft, serve_target
from specdec.candidates import CandidateTree
from specdec.commit import TokenSource
from specdec.log import Log
from specdec.messages import (
    Committed,
    DraftBlock,
    DraftItem,
    DraftOpen,
    DraftPlan,
    DraftResult,
    Epoch,
    Grant,
    Header,
    Opened,
    Refusal,
    RefusalReason,
    Release,
    Released,
    TargetItem,
    TargetOpen,
    TargetResult,
    VerifyBlock,
)
from specdec.params import SamplingParams, StopConditions
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.continuations import plain_output
from tools.fake_worker import BUNDLE
from tools.identities import draft_identity, target_identity
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel

PROMPT = (5, 6, 7, 8)
ROOT = bytes(16)
SAMPLING = SamplingParams(temperature=0.75, seed=11)  # 0.75 is the same in the wire's 32 bits
STOP = StopConditions(len(PROMPT), len(PROMPT) + 20)
EPOCH = Epoch(1, "scheduler-1")


def header(log: Log, epoch: Epoch = EPOCH) -> Header:
    return Header("s", epoch, len(log), log.digest)


@contextlib.asynccontextmanager
async def target(law: TableLaw) -> AsyncIterator[tuple[GrpcTargetLink, asyncio.Queue[TargetResult]]]:
    worker = TargetWorker(TargetConfig("t1"), TableModel(law), target_identity("t1"))
    stop, ready = asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.create_task(serve_target(worker, BUNDLE, "127.0.0.1:0", on_ready=ready.put, stop=stop))
    link, results = GrpcTargetLink(await ready.get()), asyncio.Queue[TargetResult]()

    def deliver(batch: Sequence[TargetResult]) -> None:
        for result in batch:
            results.put_nowait(result)

    try:
        await link.open(deliver, lambda cause: None)
        yield link, results
    finally:
        await link.close()
        stop.set()
        await serving


async def test_a_target_verifies_over_the_wire_what_plain_decoding_gives() -> None:
    law = TableLaw()
    expected = plain_output(law, PROMPT, SAMPLING, 20, STOP)
    async with target(law) as (link, results), asyncio.timeout(20):
        log = Log(ROOT, PROMPT)
        wrong = (expected[2] + 1) % law.vocabulary_size
        opening = TargetOpen(PROMPT, SAMPLING, STOP, Grant(0), ROOT)
        block = VerifyBlock(CandidateTree.chain([expected[0], expected[1], wrong]), Grant(0))
        link.send([TargetItem(header(log), opening), TargetItem(header(log), block)])
        assert isinstance((await results.get()).body, Opened)
        first = (await results.get()).body
        while not isinstance(first, Committed):
            first = (await results.get()).body
        assert first.token_ids == tuple(expected[:3])
        assert first.sources == (TokenSource.ACCEPTED, TokenSource.ACCEPTED, TokenSource.CORRECTION)
        log.append(first.token_ids)
        link.send([TargetItem(header(log), VerifyBlock(CandidateTree(), Grant(100)))])
        while len(log) < STOP.max_length:
            result = await results.get()
            assert isinstance(result.body, Committed)
            assert (result.header.base_length, result.header.prefix_digest) == (len(log), log.digest)
            log.append(result.body.token_ids)
        assert log.since(len(PROMPT)) == expected
        link.send([TargetItem(header(log), Release())])
        assert isinstance((await results.get()).body, Released)
        assert (await link.load()).sequences == 0


async def test_an_older_epoch_is_refused_over_the_wire() -> None:
    async with target(TableLaw()) as (link, results), asyncio.timeout(20):
        log = Log(ROOT, PROMPT)
        opening = TargetOpen(PROMPT, SAMPLING, STOP, Grant(0), ROOT)
        newer, older = Epoch(2, "scheduler-2"), Epoch(1, "scheduler-1")
        link.send([TargetItem(header(log, newer), opening), TargetItem(header(log, older), opening)])
        refusal = (await results.get()).body
        while not isinstance(refusal, Refusal):
            refusal = (await results.get()).body
        assert refusal.reason is RefusalReason.EPOCH
        assert refusal.held_epoch == newer


async def test_a_draft_worker_proposes_over_the_wire() -> None:
    law = TableLaw()
    expected = plain_output(law, PROMPT, SAMPLING, 5, STOP)
    worker = DraftWorker(DraftConfig("d1"), TableDrafter(law, agreement=1.0), draft_identity("d1"))
    stop, ready = asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.create_task(serve_draft(worker, "127.0.0.1:0", on_ready=ready.put, stop=stop))
    link, results = GrpcDraftLink(await ready.get()), asyncio.Queue[DraftResult]()

    def deliver(batch: Sequence[DraftResult]) -> None:
        for result in batch:
            results.put_nowait(result)

    try:
        await link.open(deliver, lambda cause: None)
        log = Log(ROOT, PROMPT)
        link.send([DraftItem(header(log), DraftOpen(PROMPT, SAMPLING, STOP, DraftPlan(5), ROOT))])
        result = await asyncio.wait_for(results.get(), 20)
        assert isinstance(result.body, DraftBlock)
        assert result.body.candidates == CandidateTree.chain(expected)
        link.send([DraftItem(header(log), Release())])
        assert isinstance((await asyncio.wait_for(results.get(), 20)).body, Released)
        assert (await link.identify()).drafter == "model"
    finally:
        await link.close()
        stop.set()
        await serving
