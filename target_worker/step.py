"""One step of the target: forward, draw, accept, commit. Pure of threads and messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec.candidates import EMPTY
from specdec.engine.model import LanguageModel
from specdec.law import Rows, draw_together
from specdec.log_extra import about
from specdec.messages import Committed, Failure, Prefilled, TargetResult
from specdec.params import AcceptRule
from specdec.sampling import DegenerateLogits
from target_worker.batch import Work
from target_worker.decide import decide, row_paths

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a forward did for one sequence; failed: the sequence must end."""

    work: Work
    result: TargetResult
    failed: bool = False


def step(model: LanguageModel, batch: Sequence[Work]) -> list[Outcome]:
    """Runs the batch in one packed forward and commits what it decides. A bad row ends its own sequence only. The step
    time that is told holds drawing and accepting too, which also grow with the rows."""
    started = time.monotonic()
    forwarded = _forward(model, batch)
    drawn = _draw(batch, forwarded)
    outcomes: list[Outcome] = []
    for i, (work, logits) in enumerate(zip(batch, forwarded, strict=True)):
        try:
            if isinstance(logits, Exception):
                raise logits
            result = _decide(model, work, logits, len(batch), drawn.get(i))
            outcomes.append(Outcome(work, result))
        except Exception as error:
            if not isinstance(error, DegenerateLogits):
                sequence_id = work.sequence.sequence_id
                _log.exception("sequence %s failed", sequence_id, extra=about(sequence_id, private=True))
            header = work.sequence.header(len(work.sequence.log))
            outcomes.append(Outcome(work, TargetResult(header, Failure(_cause(error, work))), failed=True))
    step_time = time.monotonic() - started
    return [_timed(outcome, step_time) for outcome in outcomes]


def _cause(error: Exception, work: Work) -> str:
    message = str(error) or repr(error)
    if isinstance(error, DegenerateLogits) and work.sequence.law.params.grammar is not None:
        message += ": the grammar leaves no token here that the other fields allow"
    return message


def _timed(outcome: Outcome, step_time: float) -> Outcome:
    result = outcome.result
    if not isinstance(result.body, Committed):
        return outcome
    return replace(outcome, result=replace(result, body=replace(result.body, step_time=step_time)))


def _forward(model: LanguageModel, batch: Sequence[Work]) -> list[torch.Tensor | Exception]:
    """Logits per sequence. After an exception each half is tried alone, so that one bad row ends no neighbour."""
    try:
        return [*model.forward([work.segment for work in batch])]
    except Exception as error:
        if len(batch) == 1:
            return [error]
        half = len(batch) // 2
        return _forward(model, batch[:half]) + _forward(model, batch[half:])


def draws_together(logits: torch.Tensor) -> bool:
    """Whether the tokens of all sequences are drawn before any is looked at: on a device every look is a wait. On a CPU
    a row alone costs least."""
    return logits.is_cuda


def _draw(batch: Sequence[Work], forwarded: Sequence[torch.Tensor | Exception]) -> dict[int, list[int]]:
    """Tokens of the rows of those members of the batch that may be drawn together; none if that fails, and then each
    is drawn alone, so that one bad sequence ends no neighbour."""
    rows: dict[int, Rows] = {}
    for i, (work, logits) in enumerate(zip(batch, forwarded, strict=True)):
        law, candidates = work.sequence.law, work.candidates
        if candidates is None or isinstance(logits, Exception) or law.params.accept_rule is not AcceptRule.INVARIANT:
            continue
        if draws_together(logits):
            rows[i] = Rows(law, logits, row_paths(candidates))
    try:
        return dict(zip(rows, draw_together(list(rows.values())), strict=True))
    except Exception:
        _log.exception("drawing together failed")
        return {}


def _decide(
    model: LanguageModel, work: Work, logits: torch.Tensor, batch_size: int, drawn: Sequence[int] | None
) -> TargetResult:
    sequence = work.sequence
    if work.candidates is None:
        model.keep(sequence.sequence_id, range(work.missing))
        kv_length = model.kv_length(sequence.sequence_id)
        return TargetResult(sequence.header(kv_length), Prefilled(kv_length))
    length = len(sequence.log)
    decision = decide(sequence.law, work.candidates, logits, length, model.context_length, sequence.report, drawn)
    model.keep(sequence.sequence_id, [*range(work.missing), *(work.missing + node for node in decision.nodes)])
    committed = Committed(
        decision.committed.token_ids,
        decision.sources,
        num_draft_tokens=len(work.candidates),
        draft_length=work.candidates.draft_length,
        finish_reason=decision.committed.finish_reason,
        batch_size=batch_size,
        logprobs=decision.logprobs,
        margins=decision.margins,
    )
    header = sequence.header(length)
    sequence.append(committed, time.monotonic())
    if decision.at_bad_row:
        sequence.pending = EMPTY
    return TargetResult(header, committed)
