"""What must hold on a device, each with a figure that says how nearly: noise, logits, draws, whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu_models import stock_cached, stock_full
from bench.gpu_report import Findings
from bench.gpu_rounds import Oracle, Run, decode
from specdec import noise
from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.law import Law, Rows, draw_together
from specdec.log import Log
from specdec.params import SamplingParams, StopConditions

PREFILL = 32
VERIFY = 6
"""Rows of a verify: five candidates and the token before them."""
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
LAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SAMPLED,
    SamplingParams(temperature=0.7, top_k=50, min_p=0.02, seed=3),
)
ROUNDING = 1e-4
"""Of fp32, where transformers may differ from itself by nothing at all."""
DRAW_TIE = 1e-5
"""A token that won by less than this share of its score is a tie: float32 on two devices."""
ALLOWED = 3.0
"""Times transformers' distance from itself that ours may be from it: a maximum over few rows is a rough figure."""
ALLOWED_MEAN = 2.0
"""The same of the means, which are sharp."""
LARGEST_NOISE = 0.2
"""Noise beyond this share of the logits' spread would make every later check pass."""


@dataclass(frozen=True, slots=True)
class Reference:
    """stock: transformers' logits of the tokens behind the first `PREFILL`, [rows, vocab]. noise: by how much they
    differ from those over its own cache and by its other attention, at most; mean_noise: on average."""

    token_ids: Sequence[int]
    stock: torch.Tensor
    noise: float
    mean_noise: float

    @property
    def near_tie(self) -> float:
        """A token that won by less may be another one."""
        return ALLOWED * self.noise


def check_noise(findings: Findings, device: str, vocabulary: int) -> None:
    """The shared noise has the same bits everywhere, or target and drafter on two devices would draw apart."""
    ids, places = torch.arange(vocabulary), [(1, 1), (2**64 - 1, 12345), (77, 2**31 + 1)]
    bits = sum(
        int((noise.random_bits(*place, ids.to(device)).cpu() != noise.random_bits(*place, ids)).sum())
        for place in places
    )
    ours = noise.exponential_rows(places, vocabulary, torch.device(device)).cpu()
    expected = torch.stack([noise.exponential(*place, ids) for place in places])
    values = int((ours != expected).sum())
    detail = f"{bits} integers and {values} exponentials of {len(places) * vocabulary} differ from the CPU's"
    findings.check("noise has the CPU's bits", bits == values == 0, detail)


def check_reference(findings: Findings, model: Any, token_ids: Sequence[int]) -> Reference:
    """How far transformers is from itself is the noise that everything else is judged by."""
    full = stock_full(model, token_ids)[PREFILL:]
    others = (stock_cached(model, token_ids, PREFILL), stock_full(model, token_ids, "eager")[PREFILL:])
    differences = [(full - other).abs() for other in others]
    error = max(difference.max().item() for difference in differences)
    mean = max(difference.mean().item() for difference in differences)
    share = error / full.std().item()
    detail = (
        f"transformers' own logits, over a cache and by two kinds of attention, differ by {error:.3g} at most, "
        f"{share:.2g} of their spread"
    )
    findings.check("noise of the device is small", share < LARGEST_NOISE, detail)
    findings.figure("logit_noise", error)
    reference = Reference(token_ids, full, error, mean)
    findings.figure("near_tie", reference.near_tie)
    return reference


def check_logits(findings: Findings, runner: ModelRunner, name: str, reference: Reference) -> None:
    """Plain steps, verifies and one prefill chunk against transformers, alone and beside others: within some
    times its own noise, and the same likeliest token wherever that is no near-tie."""
    worst = mean = 0.0
    wrong = ties = rows = 0
    for chunk, neighbours in ((1, 0), (1, 3), (VERIFY, 0), (VERIFY, 3), (len(reference.token_ids), 0)):
        logits = _fed(runner, reference.token_ids, chunk, neighbours)
        differs = logits.argmax(dim=-1) != reference.stock.argmax(dim=-1)
        best = reference.stock.topk(2, dim=-1).values
        tie = best[:, 0] - best[:, 1] <= reference.near_tie
        difference = (logits - reference.stock).abs()
        worst, mean = max(worst, difference.max().item()), max(mean, difference.mean().item())
        wrong += int((differs & ~tie).sum())
        ties += int((differs & tie).sum())
        rows += len(logits)
    detail = (
        f"off by {worst:.3g} at most (noise {reference.noise:.3g}), {mean:.3g} on average (noise "
        f"{reference.mean_noise:.3g}); of {rows} rows {wrong} have another likeliest "
        f"token, {ties} more at a near-tie"
    )
    near = worst <= ALLOWED * reference.noise + ROUNDING and mean <= ALLOWED_MEAN * reference.mean_noise + ROUNDING
    findings.check(f"logits of {name} are transformers'", near and not wrong, detail)


def _fed(runner: ModelRunner, token_ids: Sequence[int], chunk: int, neighbours: int) -> torch.Tensor:
    """Logits behind the first PREFILL tokens, fed in chunks beside as many strangers."""
    names = [f"n{i}" for i in range(neighbours + 1)]
    texts = [token_ids if i == 0 else [*token_ids[7 * i :], *token_ids[: 7 * i]] for i in range(len(names))]
    for name in names:
        runner.open(name, Log(name.encode()))
    rows: list[torch.Tensor] = []
    first = PREFILL if chunk < len(token_ids) else 0
    try:
        if first:
            _forward(runner, names, [text[:first] for text in texts])
        for start in range(first, len(token_ids), chunk):
            rows.append(_forward(runner, names, [text[start : start + chunk] for text in texts]))
    finally:
        for name in names:
            runner.release(name)
    return torch.cat(rows)[PREFILL - first :]


def _forward(runner: ModelRunner, names: Sequence[str], chunks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of the first sequence's rows; all rows are kept."""
    for name, chunk in zip(names, chunks, strict=True):
        if not runner.reserve(name, len(chunk)):
            raise RuntimeError("the KV memory does not hold the checks")
    segments = [Segment(name, tuple(chunk), None, len(chunk)) for name, chunk in zip(names, chunks, strict=True)]
    logits = runner.forward(segments)[0]
    for name, chunk in zip(names, chunks, strict=True):
        runner.keep(name, range(len(chunk)))
    return logits


def check_draws(findings: Findings, logits: torch.Tensor) -> None:
    """Tokens drawn together on the device against the same law on the CPU. Their softmax rounds differently, so a token
    may differ where the CPU's won by next to nothing."""
    stop = StopConditions(1, 2**31)
    paths = [[0] * i for i in range(len(logits))]
    batch = [Rows(Law(params, stop, [1]), logits, paths) for params in LAWS]
    wrong = ties = 0
    for rows, drawn in zip(batch, draw_together(batch), strict=True):
        scores = rows.law.scores(logits.cpu(), paths)
        for row, token_id in zip(scores, drawn, strict=True):
            best = float(row.max())
            tie = best - float(row[token_id]) <= DRAW_TIE * abs(best)
            equal = token_id == int(row.argmax())
            wrong += not equal and not tie
            ties += not equal and tie
    count = len(LAWS) * len(logits)
    detail = f"of {count} tokens under {len(LAWS)} laws {wrong} differ, {ties} more at a tie"
    findings.check("draws on the device are the CPU's", not wrong, detail)


def check_answers(
    findings: Findings, runner: ModelRunner, name: str, prompts: Sequence[Sequence[int]], tokens: int, near_tie: float
) -> Run:
    """Whole answers, speculative against plain, greedy and drawn: each is equal, or first differs where the plain token
    won by a near-tie. Returns the plain greedy run."""
    runs: list[Run] = []
    for params in (LAWS[0], SAMPLED):
        plain = decode(runner, prompts, tokens, params, margins=True)
        drafted = decode(runner, prompts, tokens, params, Oracle(plain.answers, 0.8, VERIFY - 1))
        margins = [_first_difference(*pair) for pair in zip(plain.answers, drafted.answers, plain.margins, strict=True)]
        found = [margin for margin in margins if margin is not None]
        # Noise on a logit is noise on log p + g divided by the temperature.
        bound = near_tie / (params.temperature or 1.0)
        detail = (
            f"{len(prompts) - len(found)} of {len(prompts)} answers are equal, {len(found)} differ first at margins up "
            f"to {max(found, default=0):.3g} (near-tie: {bound:.3g})"
        )
        kind = "drawn" if params.temperature else "greedy"
        findings.check(f"{kind} answers of {name} are plain's", all(margin <= bound for margin in found), detail)
        runs.append(plain)
    return runs[0]


def _first_difference(plain: Sequence[int], drafted: Sequence[int], margins: Sequence[float]) -> float | None:
    return next((margin for a, b, margin in zip(plain, drafted, margins, strict=True) if a != b), None)


def check_repeats(findings: Findings, runner: ModelRunner, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """The same run twice: nothing that was left behind in pool or graph buffers is read."""
    params = replace(SAMPLED, seed=5)
    first, second = (decode(runner, prompts, tokens, params).answers for _ in range(2))
    findings.check("a run repeats itself", first == second, f"{sum(map(len, first))} tokens twice")
