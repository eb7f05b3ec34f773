"""Decoding as the target worker does it, without services: plainly, or with a draft model whose candidates an oracle
replaces, so that acceptance is what was asked for and drafting costs what it costs. And transformers' own decoding."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_models import stock
from specdec.candidates import EMPTY, CandidateTree
from specdec.drafter import DraftJob
from specdec.drafters.model import ModelDrafter
from specdec.engine.runner import ModelRunner
from specdec.law import Law
from specdec.log import Log
from specdec.messages import Committed, Epoch, Grant
from specdec.params import Report, SamplingParams, StopConditions
from target_worker.batch import Work, make_work
from target_worker.sequence import TargetSequence
from target_worker.step import step

GREEDY = SamplingParams(temperature=0.0)
CHUNK = 2048


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Run:
    """Answers of all prompts. seconds: without the prefill. rounds: steps of the target behind the prefill. margins: by
    how much each token won, if asked for."""

    answers: list[list[int]]
    seconds: float
    rounds: int
    margins: list[list[float]]
    accepted: int = 0
    drafted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer) - 1 for answer in self.answers) / self.seconds  # the first comes with the prefill

    @property
    def round_ms(self) -> float:
        return self.seconds * 1e3 / max(self.rounds, 1)


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the answers; its candidates are right with probability `acceptance`, each depth for itself."""

    answers: Sequence[Sequence[int]]
    acceptance: float
    draft_length: int
    drafter: ModelDrafter | None = None
    """What drafting costs; None: nothing."""

    def candidates(self, sequences: Sequence[TargetSequence], draw: random.Random) -> list[CandidateTree]:
        if self.drafter is not None:
            self.drafter.draft([self._job(sequence) for sequence in sequences])
        return [self._chain(sequence, draw) for sequence in sequences]

    def _job(self, sequence: TargetSequence) -> DraftJob:
        return DraftJob(sequence.sequence_id, sequence.log, sequence.law.params, sequence.stop, self.draft_length)

    def _chain(self, sequence: TargetSequence, draw: random.Random) -> CandidateTree:
        done = len(sequence.log) - sequence.stop.prompt_length
        answer = self.answers[int(sequence.sequence_id)]
        right = answer[done : done + self.draft_length]
        return CandidateTree.chain(
            token_id if draw.random() < self.acceptance else (token_id + 1) % 1000 for token_id in right
        )


def decode(
    target: ModelRunner,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    params: SamplingParams = GREEDY,
    oracle: Oracle | None = None,
    margins: bool = False,
) -> Run:
    """Decodes all prompts in one batch. Raises RuntimeError if a sequence fails."""
    sequences = [_open(target, i, prompt, tokens, params, margins) for i, prompt in enumerate(prompts)]
    draw = random.Random(0)
    run = Run([], 0.0, 0, [])
    try:
        _prefill(target, sequences)
        if oracle is not None:
            oracle.candidates(sequences, draw)  # its prefill
        synchronize(target.device)
        started = time.perf_counter()
        while running := [sequence for sequence in sequences if not sequence.finished]:
            trees = oracle.candidates(running, draw) if oracle is not None else [EMPTY] * len(running)
            _round(target, running, trees, run)
        synchronize(target.device)
        run.seconds = time.perf_counter() - started
    finally:
        for sequence in sequences:
            target.release(sequence.sequence_id)
            if oracle is not None and oracle.drafter is not None:
                oracle.drafter.release(sequence.sequence_id)
    run.answers = [sequence.log.since(sequence.stop.prompt_length) for sequence in sequences]
    run.margins = [sequence.margins for sequence in sequences]
    return run


def _open(
    target: ModelRunner, index: int, prompt: Sequence[int], tokens: int, params: SamplingParams, margins: bool
) -> TargetSequence:
    log = Log(f"{index}".encode(), prompt)
    stop = StopConditions(len(prompt), len(prompt) + tokens)
    target.open(str(index), log)
    law = Law(params, stop, log.token_ids)
    report = Report(margins=margins)
    return TargetSequence(str(index), 1, Epoch(1, "gpu"), log, len(log), law, Grant(0), 0.0, report)


def _prefill(target: ModelRunner, sequences: Sequence[TargetSequence]) -> None:
    """Prompt by prompt, up to and with the first token: what is timed afterwards is decoding alone."""
    for sequence in sequences:
        while len(sequence.log) == sequence.stop.prompt_length:
            sequence.pending = EMPTY
            _step(target, [sequence])


def _round(target: ModelRunner, running: list[TargetSequence], trees: list[CandidateTree], run: Run) -> None:
    for sequence, tree in zip(running, trees, strict=True):
        sequence.pending = tree
    for committed in _step(target, running):
        run.accepted += len(committed.token_ids) - 1
        run.drafted += committed.num_draft_tokens
    run.rounds += 1


def _step(target: ModelRunner, sequences: Sequence[TargetSequence]) -> list[Committed]:
    batch: list[Work] = []
    for sequence in sequences:
        work = make_work(sequence, target.kv_length(sequence.sequence_id), CHUNK, time.monotonic())
        if work is None or not target.reserve(sequence.sequence_id, len(work.segment.token_ids)):
            raise RuntimeError("the KV memory does not hold this batch")
        batch.append(work)
    outcomes = step(target, batch)
    failed = next((outcome.result.body for outcome in outcomes if outcome.failed), None)
    if failed is not None:
        raise RuntimeError(f"a sequence failed: {failed}")
    return [outcome.result.body for outcome in outcomes if isinstance(outcome.result.body, Committed)]


def generate(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, draft: Any = None, draft_length: int = 5
) -> Run:
    """transformers' own greedy decoding of prompts of one length in one batch, with a draft model if there is one
    (which takes one prompt)."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    if draft is not None:
        draft.generation_config.num_assistant_tokens = draft_length
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft
    forwards: list[int] = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        with stock(model), torch.inference_mode():
            if draft is not None:
                draft.set_attn_implementation("sdpa")
            first = _timed(model, ids, 1, options)[1]
            del forwards[:]
            output, seconds = _timed(model, ids, tokens, options)
    finally:
        handle.remove()
        if draft is not None:
            draft.set_attn_implementation("outrider_paged")
    answers = [row[ids.shape[1] :] for row in output.tolist()]
    return Run(answers, max(seconds - first, 1e-9), len(forwards) - 1, [])


def _timed(model: Any, ids: torch.Tensor, tokens: int, options: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Token ids of prompts and answers, and seconds."""
    synchronize(str(model.device))
    started = time.perf_counter()
    output: torch.Tensor = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
    synchronize(str(model.device))
    return output, time.perf_counter() - started
