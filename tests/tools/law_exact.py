"""The law of an accept rule's output, exactly: every draft is enumerated, and the uniforms are integrated over the
intervals that the rule itself shows. The rule is called as it is; only its answers are read."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.candidates import ROOT, CandidateTree, DraftLaw
from specdec.ratio import dense_laws

Rule = Callable[[Sequence[int], Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""parents, token_ids, draft_ids, draft_probs, target_probs, accept_uniforms, draw_uniforms -> node, token."""

OutputLaw = dict[tuple[int, ...], float]

_HALVINGS = 64
"""Of (0, 1): beyond what a float64 can tell apart."""


@dataclass(frozen=True)
class ExactCase:
    """parents: shape of the tree. target, drafts: seeds of random laws that depend on the path. replaced: siblings are
    drawn with replacement, each from a law of its own; else without, from one law."""

    parents: tuple[int, ...]
    vocabulary_size: int
    seed: int
    replaced: bool = False

    def target_law(self, path: Sequence[int]) -> Tensor:
        """float64 [vocab]; about one token in five is impossible."""
        generator = torch.Generator().manual_seed(self._key(0, path))
        law = torch.rand(self.vocabulary_size, generator=generator, dtype=torch.float64) ** 3
        law[torch.rand(self.vocabulary_size, generator=generator) < 0.2] = 0.0
        if not law.sum() > 0:
            law[0] = 1.0
        return law / law.sum()

    def draft_law(self, path: Sequence[int], sibling: int) -> DraftLaw:
        generator = torch.Generator().manual_seed(self._key(1 + self.replaced * sibling, path))
        weights = torch.randint(0, 1000, (self.vocabulary_size,), generator=generator).tolist()
        least = 150 if self.sparse else -1
        kept = {token_id: 1 + weight for token_id, weight in enumerate(weights) if weight > least} or {0: 1}
        return DraftLaw(tuple(kept), tuple(kept.values()))

    @property
    def sparse(self) -> bool:
        """Whether draft laws leave tokens out; not where siblings would run out of tokens."""
        return self.replaced or len(set(self.parents)) == len(self.parents)

    def _key(self, model: int, path: Sequence[int]) -> int:
        key = self.seed * 64 + model
        for token_id in path:
            key = key * (self.vocabulary_size + 1) + token_id + 1
        return key

    @cached_property
    def drafts(self) -> list[tuple[CandidateTree, float]]:
        """Every draft and its probability."""
        partial: list[tuple[CandidateTree, float]] = [(CandidateTree(), 1.0)]
        for i in range(len(self.parents)):
            partial = [longer for tree, mass in partial for longer in self._longer(tree, mass, i)]
        return partial

    def _longer(self, tree: CandidateTree, mass: float, i: int) -> list[tuple[CandidateTree, float]]:
        parent = self.parents[i]
        path = [tree.token_ids[node] for node in tree.path(parent)]
        siblings = tree.children(parent)
        law = self.draft_law(path, len(siblings))
        if not self.replaced:
            for sibling in siblings:
                law = law.without(tree.token_ids[sibling])
        total = sum(law.weights)
        return [
            (
                CandidateTree((*tree.token_ids, token_id), (*tree.parents, parent), (*tree.laws, law)),
                mass * weight / total,
            )
            for token_id, weight in zip(law.token_ids, law.weights, strict=True)
        ]


@dataclass
class _Rows:
    """One row per draft and pattern of decisions. accept: representative uniforms of the columns decided so far, ones
    behind them; mass: draft probability x size of the intervals."""

    draft: Tensor  # [rows], int64
    accept: Tensor  # [rows, n]
    mass: Tensor  # [rows]

    def pick(self, rows: Tensor) -> _Rows:
        return _Rows(self.draft[rows], self.accept[rows].clone(), self.mass[rows].clone())


class ExactLaw:
    """Integrates one rule over one case."""

    def __init__(self, rule: Rule, case: ExactCase) -> None:
        self._rule = rule
        self._case = case
        self._trees = [tree for tree, _ in case.drafts]
        self._token_ids = torch.tensor([tree.token_ids for tree in self._trees])
        dense = [dense_laws(tree) for tree in self._trees]
        width = max(ids.shape[1] for ids, _ in dense)
        self._ids = torch.stack([_padded(ids, width) for ids, _ in dense])
        self._probs = torch.stack([_padded(probs, width) for _, probs in dense])
        self._target = torch.stack([self._target_rows(tree) for tree in self._trees])
        self._leaves = self._integrate()

    @cached_property
    def output(self) -> OutputLaw:
        """Probability of each output: the accepted tokens and the one behind them."""
        law: OutputLaw = defaultdict(float)
        node, _ = self._call(self._leaves.draft, self._leaves.accept, torch.full((len(self._leaves.draft),), 0.5))
        tokens = self._token_law(self._leaves)
        for row, (draft, end) in enumerate(zip(self._leaves.draft.tolist(), node.tolist(), strict=True)):
            tree = self._trees[draft]
            path = tuple(tree.token_ids[i] for i in tree.path(end))
            for token_id, share in enumerate(tokens[row].tolist()):
                if share:
                    law[*path, token_id] += float(self._leaves.mass[row]) * share
        return dict(law)

    @property
    def mean_accepted(self) -> float:
        """Expected number of accepted candidates."""
        return sum(mass * (len(tokens) - 1) for tokens, mass in self.output.items())

    def worst_difference(self) -> float:
        """Largest difference from the target's law over all continuations as long as the longest output. Shorter
        outputs go on with the target's law, as the next round does."""
        depth = max(len(tree.path(node)) for tree in self._trees[:1] for node in range(len(tree))) + 1
        actual: OutputLaw = defaultdict(float)
        for tokens, mass in self.output.items():
            for longer, share in self._continued(tokens, depth):
                actual[longer] += mass * share
        wanted = dict(self._continued((), depth))
        return max(abs(actual.get(tokens, 0.0) - wanted.get(tokens, 0.0)) for tokens in {*actual, *wanted})

    def _continued(self, tokens: tuple[int, ...], depth: int) -> list[tuple[tuple[int, ...], float]]:
        found: list[tuple[tuple[int, ...], float]] = []
        for rest in itertools.product(range(self._case.vocabulary_size), repeat=depth - len(tokens)):
            longer, share = tokens, 1.0
            for token_id in rest:
                share *= float(self._case.target_law(longer)[token_id])
                longer = (*longer, token_id)
            if share:
                found.append((longer, share))
        return found

    def _target_rows(self, tree: CandidateTree) -> Tensor:
        paths = [[tree.token_ids[i] for i in tree.path(node)] for node in range(-1, len(tree))]
        return torch.stack([self._case.target_law(path) for path in paths])

    def _call(self, draft: Tensor, accept: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        target, ids, probs = self._target[draft], self._ids[draft], self._probs[draft]
        return self._rule(self._case.parents, self._token_ids[draft], ids, probs, target, accept, draw.double())

    def _integrate(self) -> _Rows:
        masses = torch.tensor([mass for _, mass in self._case.drafts], dtype=torch.float64)
        count = len(self._case.parents)
        rows = _Rows(torch.arange(len(masses)), torch.ones(len(masses), count, dtype=torch.float64), masses)
        for column in range(count):
            threshold = self._threshold(rows, column)
            below, above = rows.pick(threshold > 0), rows.pick(threshold < 1)
            taken, left = threshold[threshold > 0], threshold[threshold < 1]
            below.accept[:, column], above.accept[:, column] = taken / 2, (1 + left) / 2
            below.mass *= taken
            above.mass *= 1 - left
            rows = _Rows(
                torch.cat([below.draft, above.draft]),
                torch.cat([below.accept, above.accept]),
                torch.cat([below.mass, above.mass]),
            )
        return rows

    def _threshold(self, rows: _Rows, column: int) -> Tensor:
        """Up to which uniform candidate `column` is on the accepted path; those behind it are made to fail."""
        on_path = self._below(column)

        def passes(uniform: Tensor) -> Tensor:
            accept = rows.accept.clone()
            accept[:, column] = uniform
            node, _ = self._call(rows.draft, accept, torch.full((len(uniform),), 0.5))
            return on_path[node + 1]

        return _halve(passes, torch.zeros(len(rows.draft), dtype=torch.float64))

    def _below(self, candidate: int) -> Tensor:
        """bool [1 + n]: whether node - 1 lies on or below `candidate`."""
        tree = CandidateTree((0,) * len(self._case.parents), self._case.parents)
        return torch.tensor([candidate in tree.path(node) for node in range(ROOT, len(tree))])

    def _token_law(self, rows: _Rows) -> Tensor:
        """[rows, vocab]: how much of (0, 1) draws each token."""
        bounds = [torch.zeros(len(rows.draft), dtype=torch.float64)]
        for token_id in range(self._case.vocabulary_size - 1):

            def at_most(uniform: Tensor, token_id: int = token_id) -> Tensor:
                return self._call(rows.draft, rows.accept, uniform)[1] <= token_id

            bounds.append(_halve(at_most, bounds[-1]))
        bounds.append(torch.ones(len(rows.draft), dtype=torch.float64))
        return torch.stack(bounds, dim=-1).diff(dim=-1)


def _halve(holds: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where in [start, 1] a condition that holds for small uniforms stops to hold."""
    low, high = start.clone(), torch.ones_like(start)
    always = holds(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        held = holds(middle)
        low, high = torch.where(held, middle, low), torch.where(held, high, middle)
    return torch.where(always, 1.0, high)


def _padded(table: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))
