"""What the target says to a block: the accept rule, the stops, and what is told of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.accept import Accepted, accept_invariant
from specdec.candidates import CandidateTree
from specdec.commit import CommittedTokens, TokenSource, commit
from specdec.law import Law, Path
from specdec.margins import margins
from specdec.messages import TokenLogprobs
from specdec.params import AcceptRule, LogprobsOf, Report
from specdec.ratio import accept_ratio
from specdec.sampling import NOTHING, DegenerateLogits


@dataclass(frozen=True, slots=True)
class Decision:
    """nodes: candidates whose KV stays; the last token has none. at_bad_row: nothing can be drawn behind the last
    token, so no block is worth waiting for."""

    committed: CommittedTokens
    nodes: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()
    at_bad_row: bool = False


def row_paths(candidates: CandidateTree) -> list[Path]:
    """Of each row of a step: behind the log, and behind each candidate."""
    return [(), *(tuple(candidates.token_ids[i] for i in candidates.path(node)) for node in range(len(candidates)))]


def decide(
    law: Law,
    candidates: CandidateTree,
    logits: Tensor,
    log_length: int,
    context_length: int,
    report: Report,
    drawn: Sequence[int] | None = None,
) -> Decision:
    """logits: [1 + len(candidates), vocab], behind the log and behind each candidate. drawn: the rows' tokens under
    `invariant`, if they were drawn with other sequences'. Raises DegenerateLogits."""
    paths = row_paths(candidates)
    if drawn is None:
        accepted = _accept(law, candidates, logits, paths, log_length)
    else:
        accepted = _accept_drawn(candidates, drawn)
    committed = commit(log_length, accepted.token_ids, law.stop, context_length)
    count = len(committed.token_ids)
    rows = [0, *(1 + node for node in accepted.nodes)][:count]  # the row that decided each token
    told = _Told(law, logits, rows, [paths[row] for row in rows], committed.token_ids)
    return Decision(
        committed,
        accepted.nodes[: count - 1],
        accepted.sources[:count],
        told.logprobs(report) if report.top_logprobs is not None else (),
        told.margins(report) if report.margins else (),
        at_bad_row=len(accepted.token_ids) == len(accepted.nodes),
    )


def _accept(law: Law, candidates: CandidateTree, logits: Tensor, paths: Sequence[Path], log_length: int) -> Accepted:
    rule = law.params.accept_rule
    if rule is not AcceptRule.INVARIANT:
        probs, bad_rows = _laws(law, logits, paths)
        # On the CPU, since the tests of candidates one after the other would wait each time.
        return accept_ratio(rule, candidates, probs.cpu(), law.params.seed, log_length, bad_rows)
    try:
        return accept_invariant(candidates, law.draw(logits, paths))
    except DegenerateLogits:
        return _accept_as_far_as_possible(law, candidates, logits, paths)


def _laws(law: Law, logits: Tensor, paths: Sequence[Path]) -> tuple[Tensor, frozenset[int]]:
    """The law of each row, [rows, vocab], and which rows have none; another's stands there. Raises DegenerateLogits if
    the first is one of them."""
    try:
        return law.probs(logits, paths), frozenset()
    except DegenerateLogits:
        laws = [law.probs(logits[:1], paths[:1])]
    bad_rows: set[int] = set()
    for row in range(1, len(paths)):
        try:
            laws.append(law.probs(logits[row : row + 1], paths[row : row + 1]))
        except DegenerateLogits:
            laws.append(laws[0])
            bad_rows.add(row)
    return torch.cat(laws), frozenset(bad_rows)


def _accept_as_far_as_possible(law: Law, candidates: CandidateTree, logits: Tensor, paths: Sequence[Path]) -> Accepted:
    """Row by row, since one is bad. Raises DegenerateLogits if it is the first."""
    drawn = law.draw(logits[:1], paths[:1])
    for row in range(1, len(paths)):
        try:
            drawn += law.draw(logits[row : row + 1], paths[row : row + 1])
        except DegenerateLogits:
            drawn.append(NOTHING)
    return _accept_drawn(candidates, drawn)


def _accept_drawn(candidates: CandidateTree, drawn: Sequence[int]) -> Accepted:
    """A bad row behind a candidate is no fault of the sequence unless plain decoding comes to stand there. Then the
    path down to it is accepted, with no token behind it. Raises DegenerateLogits if the first row is bad."""
    if drawn[0] == NOTHING:
        raise DegenerateLogits("logits hold NaN or no finite value")
    accepted = accept_invariant(candidates, drawn)
    if accepted.token_ids[-1] != NOTHING:
        return accepted
    return Accepted(accepted.nodes, accepted.token_ids[:-1], accepted.sources[:-1])


@dataclass(frozen=True, slots=True)
class _Told:
    """What the rows say that decided the committed tokens. step_logits: [rows of the step, vocab]."""

    law: Law
    step_logits: Tensor
    rows: Sequence[int]
    paths: Sequence[Path]
    token_ids: Sequence[int]

    @property
    def logits(self) -> Tensor:
        """[tokens, vocab]."""
        return self.step_logits[list(self.rows)]

    def logprobs(self, report: Report) -> tuple[TokenLogprobs, ...]:
        if report.logprobs_of is LogprobsOf.RAW:
            table = torch.log_softmax(self.logits.float(), dim=-1)
        else:
            table = torch.log(self.law.probs(self.logits, self.paths))
        return tuple(
            TokenLogprobs(float(row[token_id]), _top(row, report.top_logprobs or 0))
            for row, token_id in zip(table, self.token_ids, strict=True)
        )

    def margins(self, report: Report) -> tuple[float, ...]:
        """By how much each token won. Under the rules that test ratios a token does not win by a margin; what is told
        then is that of the shared noise, and means nothing."""
        return tuple(margins(self.law, self.logits, self.paths, self.token_ids, report.noise))


def _top(row: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens, likeliest first; those that cannot be drawn are not told."""
    values, token_ids = torch.topk(row, min(count, len(row)))
    pairs = zip(token_ids.tolist(), values.tolist(), strict=True)
    return tuple((token_id, value) for token_id, value in pairs if value > -torch.inf)
