"""The audit over answers that match a grammar: the replay draws under the same masks."""

from __future__ import annotations

import json

import pytest

from scheduler import counters as names
from scheduler.audit import AuditConfig
from scheduler.request import GenerationRequest
from services.metrics import role_metrics
from specdec.params import Grammar, GrammarKind, SamplingParams
from tools.deployment import quick_config
from tools.exposition import by_label, value
from tools.grammar_system import SCHEMAS, GrammarDeployment, MaskedContinuation, table_model
from tools.grammar_vocabulary import STOP, VOCABULARY
from tools.planted import Found, shift_verify_rows
from tools.scripted import ScriptedDrafter, WrongFrom
from tools.waiting import until

EVERY = AuditConfig(share=1.0, queue=64, poll=0.01)


@pytest.mark.parametrize("planted", [False, True], ids=["honest", "planted"])
async def test_answers_under_a_grammar_are_audited(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, found = role_metrics("scheduler"), Found()
    drafter = ScriptedDrafter(WrongFrom(2, VOCABULARY), MaskedContinuation())
    async with GrammarDeployment(
        [table_model()], [drafter], quick_config(), counters=metrics, audit=EVERY, on_mismatch=found
    ) as system:
        if planted:
            shift_verify_rows(monkeypatch)
        for i, schema in enumerate(SCHEMAS.values()):
            grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
            sampling = SamplingParams(temperature=0.8 * (i % 2), seed=i, grammar=grammar)
            await system.generate(
                GenerationRequest((1, 2, 3), sampling, max_tokens=40, stop_token_ids=frozenset({STOP}))
            )
        await until(lambda: sum(by_label(metrics, names.AUDITS).values()) == len(SCHEMAS), "audits", patience=30.0)

    assert value(metrics, names.NUM_ACCEPTED_TOKENS) > 0
    if planted:
        assert len(found.mismatches) == value(metrics, names.AUDIT_MISMATCHES) > 0
    else:
        assert by_label(metrics, names.AUDITS) == {"equal": len(SCHEMAS)}
