"""The seams through which the tests of the law draw, and where mutants are planted, are what running workers call."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from scheduler.request import GenerationRequest, Speculation
from specdec.drafters.model import ModelDrafter
from specdec.params import AcceptRule, SamplingParams
from tools import law_seams
from tools.deployment import Deployment, DraftSpec
from tools.identities import draft_identity, words
from tools.law_cells import DRAFT, PROMPT, TARGET, VOCABULARY_SIZE
from tools.law_seams import Seam
from tools.table_model import TableModel

SEAMS = {name: seam for name, seam in vars(law_seams).items() if isinstance(seam, Seam)}
ALWAYS = {"TARGET_LAW", "DRAFT_LAW", "ROW_LAW"}
RATIO = ALWAYS | {"TARGET_UNIFORMS", "DENSE_LAWS", "QUANTISED", "DRAW_CANDIDATE", "DRAFT_UNIFORMS"}
CALLED = {
    AcceptRule.INVARIANT: ALWAYS | {"ACCEPT_INVARIANT", "RANDOM_WORDS", "EXPONENTIAL"},
    AcceptRule.REJECTION: RATIO | {"ACCEPT_REJECTION", "RESIDUAL", "EXCESS"},
    AcceptRule.BLOCK: RATIO | {"ACCEPT_BLOCK", "RESIDUAL", "EXCESS"},
}


@pytest.mark.parametrize("rule", AcceptRule)
async def test_running_workers_call_the_seams(rule: AcceptRule, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return real(*arguments, **named)

        return wrapper

    for name, seam in SEAMS.items():
        if name != "RANDOM_SEED":  # the gateway's, tried by the test of unseeded requests
            seam.plant(monkeypatch, partial(counted, name))
    sampling = SamplingParams(presence_penalty=0.5, seed=3, accept_rule=rule)
    drafter = DraftSpec(ModelDrafter(TableModel(DRAFT)), draft_identity("draft", words(VOCABULARY_SIZE)))
    async with Deployment([TableModel(TARGET)], [drafter]) as system:
        request = GenerationRequest(PROMPT, sampling, max_tokens=60, speculation=Speculation.ON)
        answer = await system.generate(request)
    assert len(answer.token_ids) == 60
    assert {name for name in calls if calls[name]} == CALLED[rule]


def test_every_seam_is_called_under_some_rule() -> None:
    assert set().union(*CALLED.values()) == set(SEAMS) - {"RANDOM_SEED"}
