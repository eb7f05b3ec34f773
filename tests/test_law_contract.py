"""What the law rests on beside the accept rule: the law sent is the law drawn from, bit for bit, and whoever gives no
seed gets one of their own.

A draw from the bf16 rounding of a law differs from it by too little for any statistics, so each boundary is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

from services import codec_draft, codec_target
from services.gateway import Gateway
from services.generation import ChoiceStarted, TextTokens, TokenPrompt, UserRequest
from specdec.candidates import CandidateTree, DraftLaw
from specdec.digest import root_digest
from specdec.drafter import DraftJob
from specdec.drafters.model import ModelDrafter
from specdec.log import Log
from specdec.messages import DraftBlock, DraftResult, Epoch, Grant, Header, TargetItem, VerifyBlock
from specdec.noise import Domain, uniforms
from specdec.params import AcceptRule, SamplingParams
from specdec.ratio import TOP_TOKENS, TOTAL_WEIGHT, dense_laws, quantised
from tools.deployment import Deployment
from tools.law_cells import DRAFT, PROMPT, STOP
from tools.law_seams import DRAFT_UNIFORMS
from tools.table_law import TableLaw
from tools.table_model import TableModel

HEADER = Header("s", Epoch(1, "o"), len(PROMPT), bytes(16))


def draft(uniform: float | None = None, rule: AcceptRule = AcceptRule.REJECTION) -> CandidateTree:
    """One block of two candidates from the real drafter, with this uniform for every draw."""
    log = Log(root_digest(b"", "m"), PROMPT)
    job = DraftJob("s", log, SamplingParams(accept_rule=rule, seed=5), STOP, 2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if uniform is not None:
            DRAFT_UNIFORMS.plant(monkeypatch, lambda _: lambda seed, domain, base, count: torch.full((count,), uniform))
        return ModelDrafter(TableModel(DRAFT)).draft([job])[0]


def drawn(law: DraftLaw, uniform: float) -> int:
    """By exact arithmetic: the token whose share of (0, 1) holds the uniform."""
    total, below = sum(law.weights), Fraction(0)
    for token_id, weight in zip(law.token_ids, law.weights, strict=True):
        below += Fraction(weight, total)
        if Fraction(uniform) < below:
            return token_id
    raise ValueError(f"{uniform} is beyond the law")


def boundaries(law: DraftLaw) -> Sequence[float]:
    """Uniforms half a unit of weight on both sides of where each token ends."""
    total = sum(law.weights)
    ends = [sum(law.weights[: i + 1]) for i in range(len(law.weights))]
    return [(end + side) / total for end in ends for side in (-0.5, 0.5) if end + side < total]


def test_what_is_sent_is_what_was_drawn_from() -> None:
    first = draft().laws[0]
    for uniform in boundaries(first):
        tree = draft(uniform)
        assert tree.laws[0] == first
        for token_id, law in zip(tree.token_ids, tree.laws, strict=True):
            exact = drawn(law, float(torch.tensor(uniform)))
            assert token_id == exact, f"drew token {token_id} where the law that was sent gives {exact}"


def test_each_draw_has_the_uniform_of_its_place() -> None:
    tree = draft()
    chances = uniforms(5, Domain.DRAFT, len(PROMPT), 2).tolist()
    assert list(tree.token_ids) == [drawn(law, chance) for law, chance in zip(tree.laws, chances, strict=True)]


def test_the_law_arrives_bit_for_bit() -> None:
    tree = draft()
    block = codec_draft.decode_result(codec_draft.encode_result(DraftResult(HEADER, DraftBlock(tree, 0.0)))).body
    assert isinstance(block, DraftBlock)
    item = codec_target.encode_item(TargetItem(HEADER, VerifyBlock(block.candidates, Grant(9))))
    arrived = codec_target.decode_item(item).body
    assert isinstance(arrived, VerifyBlock)
    assert arrived.candidates == tree
    ids, probs = dense_laws(arrived.candidates)
    for i, law in enumerate(tree.laws):
        assert ids[i].tolist() == list(law.token_ids)
        assert probs[i].tolist() == [weight / sum(law.weights) for weight in law.weights]


def test_a_law_is_cut_to_its_top_and_holds_nothing_impossible() -> None:
    probs = torch.softmax(torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 3, dim=-1)
    probs[probs < probs.median()] = 0.0
    law = quantised(probs)
    assert len(law.token_ids) == TOP_TOKENS
    assert set(law.token_ids) == set(probs.topk(TOP_TOKENS).indices.tolist())
    assert min(law.weights) >= 1
    assert abs(sum(law.weights) - TOTAL_WEIGHT) <= TOP_TOKENS
    few = torch.zeros(1000)
    few[[3, 7]] = torch.tensor([1.0, 1e-9])
    assert dict(zip(*(lambda law: (law.token_ids, law.weights))(quantised(few)), strict=True)) == {3: 2**20, 7: 1}


async def test_unseeded_requests_differ() -> None:
    """64 requests without a seed: at least 60 different seeds and answers."""
    async with Deployment([TableModel(TableLaw(order=2))]) as system:
        gateway = Gateway(system.scheduler)

        async def ask() -> tuple[int, tuple[int, ...]]:
            seed = 0
            token_ids: list[int] = []
            async for event in gateway.generate(UserRequest(TokenPrompt((1, 2)), max_tokens=16)):
                if isinstance(event, ChoiceStarted):
                    seed = event.seed
                elif isinstance(event, TextTokens):
                    token_ids += event.token_ids
            return seed, tuple(token_ids)

        answers = await asyncio.gather(*(ask() for _ in range(64)))
    seeds, texts = (len(set(column)) for column in zip(*answers, strict=True))
    assert min(seeds, texts) >= 60, f"{seeds} seeds, {texts} answers of 64 requests"
