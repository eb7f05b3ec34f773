"""Deployments whose workers hold answers to grammars, schemas to ask for, and drafters that know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draft_worker.worker import DraftWorker
from specdec.drafter import DraftJob
from specdec.grammar import MaskFactory, TokenMask
from specdec.law import Law
from specdec.params import Grammar
from target_worker.worker import TargetWorker
from tools.deployment import Deployment, DraftSpec
from tools.grammar_vocabulary import VOCABULARY, make_grammars
from tools.identities import draft_identity, target_identity
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(vocabulary_size=VOCABULARY, order=24)


def table_model(**changes: Any) -> TableModel:
    return TableModel(LAW, **{"context_length": 4096, "blocks_total": 65536, **changes})


@dataclass(frozen=True, slots=True)
class CountedMask:
    """Counts the rows behind a candidate that the grammar forbids."""

    inner: TokenMask
    counter: GrammarCounter

    def allowed(self, answer: Sequence[int]) -> bytes:
        mask = self.inner.allowed(answer)
        self.counter.num_rows += 1
        self.counter.num_forbidden += mask == self.counter.everything
        return mask


class GrammarCounter:
    """A mask factory of its own per worker, since workers have threads of their own."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_forbidden = 0
        self.everything = ((1 << VOCABULARY) - 1).to_bytes((VOCABULARY + 31) // 32 * 4, "little")
        self._factory: MaskFactory = make_grammars()

    def __call__(self, grammar: Grammar) -> TokenMask:
        return CountedMask(self._factory(grammar), self)


class GrammarDeployment(Deployment):
    """A `Deployment` in which every worker makes masks. counter: of the target workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counters: list[GrammarCounter] = []

    async def __aenter__(self) -> GrammarDeployment:
        await super().__aenter__()
        return self

    @property
    def num_forbidden(self) -> int:
        return sum(counter.num_forbidden for counter in self.counters)

    def new_target_worker(self, model: TableModel, worker_id: str) -> TargetWorker:
        counter = GrammarCounter()
        self.counters.append(counter)
        identity = target_identity(worker_id, model.vocabulary_size, model.context_length, model.name)
        worker = TargetWorker(replace(self._target_config, worker_id=worker_id), model, identity, counter)
        self._workers.append(worker)
        worker.start()
        return worker

    def new_draft_worker(self, spec: DraftSpec, worker_id: str) -> DraftWorker:
        identity = spec.identity or draft_identity(worker_id, drafter=spec.drafter.name)
        config = replace(self._draft_config, worker_id=worker_id)
        worker = DraftWorker(config, spec.drafter, replace(identity, worker_id=worker_id), make_grammars())
        self._workers.append(worker)
        worker.start()
        return worker


class MaskedContinuation:
    """What the target will say under the job's grammar: implements `Continuation`."""

    def __call__(self, job: DraftJob) -> list[int]:
        log = list(job.log.token_ids)
        law = Law(job.sampling, job.stop, log, job.mask)
        for _ in range(job.draft_length):
            log += law.draw(torch.tensor(LAW.logits(log)).unsqueeze(0), [()])
            if log[-1] in job.stop.stop_token_ids:
                break
        return log[len(job.log) :]


def _strict(properties: dict[str, object], required: Sequence[str] | None = None) -> dict[str, object]:
    required = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 8}
SCHEMAS: dict[str, dict[str, object]] = {
    "flat": _strict({"name": SHORT, "age": {"type": "integer"}}),
    "nested": _strict({"a": _strict({"b": _strict({"c": SHORT}), "red": {"type": "boolean"}})}),
    "enum": _strict({"name": {"enum": ["red", "cab", 12, None, True]}}),
    "array bounds": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "array of objects": {"type": "array", "items": _strict({"a": SHORT}, []), "minItems": 1, "maxItems": 3},
    "integer range": _strict({"a": {"type": "integer", "minimum": -12, "maximum": 400}}),
    "number": _strict({"a": {"type": "number", "exclusiveMinimum": 0, "maximum": 12.5}}),
    "pattern": _strict({"name": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{3}$"}}),
    "optional": _strict({"a": SHORT, "name": {"type": "null"}, "red": {"type": "boolean"}}, ["name"]),
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": "ab"}, "maxItems": 2}]},
    "definitions": {
        "$defs": {"point": _strict({"x": {"type": "integer"}, "y": {"type": "integer"}})},
        **_strict({"a": {"$ref": "#/$defs/point"}, "b": {"$ref": "#/$defs/point"}}),
    },
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 9},
}
