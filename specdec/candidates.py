"""Candidate trees: what a drafter proposes and a target verifies.

A *candidate* is a proposed token. Candidates are always a tree over the committed prefix; a chain is the tree with one
branch. `parents[i] < i`, so a tree is read from the root outwards in index order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field

from specdec.params import AcceptRule
from specdec.value import value

ROOT = -1
"""The parent of a candidate that follows the committed prefix directly."""

MAX_CANDIDATES = 256
"""Candidates in one block at most. More could not pay, and it bounds what a worker must hold."""


_CHAIN = tuple(range(ROOT, MAX_CANDIDATES))
"""The parents of a chain that is longer than any block."""

WEIGHT_LIMIT = 2**32

TOKEN_ID_LIMIT = 2**31
"""Token ids are below it, whatever the vocabulary."""


class InvalidCandidates(ValueError):
    """The candidates are no tree, or a token id is not in the vocabulary."""


@value
class DraftLaw:
    """What a candidate was drawn from, bit for bit: `token_ids[i]` with probability `weights[i] / sum(weights)`."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]

    @classmethod
    def certain(cls, token_id: int) -> DraftLaw:
        """The law of a drafter that does not draw."""
        return cls((token_id,), (1,))

    def without(self, token_id: int) -> DraftLaw:
        """The law of the next sibling, drawn without replacement."""
        kept = [(i, w) for i, w in zip(self.token_ids, self.weights, strict=True) if i != token_id]
        return DraftLaw(tuple(i for i, _ in kept), tuple(w for _, w in kept))


@value
class CandidateTree:
    """`token_ids[i]` follows candidate `parents[i]`, or the committed prefix where that is `ROOT`.

    laws: under the rules that test ratios one per candidate, given that its earlier siblings were rejected; else none.
    confidences: one per candidate, in [0, 1], how sure the drafter was at its depth; or none. Only hints.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    laws: tuple[DraftLaw, ...] = ()
    confidences: tuple[float, ...] = field(default=(), compare=False)

    @classmethod
    def chain(cls, token_ids: Iterable[int]) -> CandidateTree:
        ids = tuple(token_ids)
        return cls(ids, tuple(range(-1, len(ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each candidate; 0 follows the committed prefix."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def draft_length(self) -> int:
        """Candidates on the longest path."""
        return len(self.token_ids) if self.is_chain else max(self.depths) + 1

    @property
    def certainty(self) -> float:
        """The product of the drafter's confidences down the likeliest path; 1 if it does not say."""
        if not self.confidences or self.is_chain:  # most are
            return math.prod(self.confidences)
        return math.prod(self.confidences[i] for i in self._first_children())

    @property
    def likeliest_path(self) -> Sequence[int]:
        """Its tokens: drafters put the likeliest sibling first."""
        return self.token_ids if self.is_chain else [self.token_ids[i] for i in self._first_children()]

    def _first_children(self) -> list[int]:
        """Candidates from the root on, each the first that follows the one before."""
        nodes: list[int] = []
        for i, parent in enumerate(self.parents):
            if parent == (nodes[-1] if nodes else ROOT):
                nodes.append(i)
        return nodes

    @property
    def is_chain(self) -> bool:
        return self.parents == _CHAIN[: len(self.token_ids)]

    def children(self, parent: int) -> list[int]:
        """Candidates that follow `parent`, in index order."""
        return [i for i, p in enumerate(self.parents) if p == parent]

    def children_by_parent(self) -> dict[int, list[int]]:
        """`children` of every candidate that has some, and of `ROOT`."""
        children: dict[int, list[int]] = {}
        for i, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(i)
        return children

    def path(self, node: int) -> list[int]:
        """Candidates from the root down to and including `node`; empty for `ROOT`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def walk(self, token_ids: Sequence[int]) -> int | None:
        """The candidate at the end of the path that spells `token_ids`, `ROOT` if they are none, None if none does."""
        frontier = [ROOT]
        for token_id in token_ids:
            frontier = [i for i, p in enumerate(self.parents) if p in frontier and self.token_ids[i] == token_id]
            if not frontier:
                return None
        return frontier[0]

    def below(self, token_ids: Sequence[int]) -> CandidateTree | None:
        """What lies below the path that spells `token_ids`; None if no path does.

        Duplicate siblings are merged: everything below any path with these tokens is kept.
        """
        if self.is_chain:  # most are
            return self._chain_below(tuple(token_ids))
        frontier = {ROOT}
        for token_id in token_ids:
            frontier = {i for i, p in enumerate(self.parents) if p in frontier and self.token_ids[i] == token_id}
            if not frontier:
                return None
        new_index = dict.fromkeys(frontier, ROOT)
        kept = [i for i, parent in enumerate(self.parents) if self._joins(new_index, i, parent)]
        return self._part(kept, new_index)

    def trimmed(self, max_depth: int) -> CandidateTree:
        """Only the candidates on the first `max_depth` levels."""
        keep = [i for i, depth in enumerate(self.depths) if depth < max_depth]
        new_index = {old: new for new, old in enumerate(keep)} | {ROOT: ROOT}
        return self._part(keep, new_index)

    def _chain_below(self, token_ids: tuple[int, ...]) -> CandidateTree | None:
        count = len(token_ids)
        if self.token_ids[:count] != token_ids:
            return None
        left = len(self) - count
        return CandidateTree(self.token_ids[count:], self.parents[:left], self.laws[count:], self.confidences[count:])

    @staticmethod
    def _joins(new_index: dict[int, int], node: int, parent: int) -> bool:
        """Gives `node` the next index if its parent has one; nodes that have become the root do not count."""
        if parent not in new_index or node in new_index:
            return False
        new_index[node] = sum(index != ROOT for index in new_index.values())
        return True

    def _part(self, nodes: list[int], new_index: dict[int, int]) -> CandidateTree:
        return CandidateTree(
            tuple(self.token_ids[i] for i in nodes),
            tuple(new_index[self.parents[i]] for i in nodes),
            tuple(self.laws[i] for i in nodes) if self.laws else (),
            tuple(self.confidences[i] for i in nodes) if self.confidences else (),
        )

    def validate_for(self, rule: AcceptRule, vocabulary_size: int) -> None:
        """Raises `InvalidCandidates` for what the accept rule cannot take."""
        self.validate(vocabulary_size)
        if rule is not AcceptRule.INVARIANT:
            self.validate_laws(vocabulary_size)
        if rule is AcceptRule.BLOCK and not self.is_chain:
            raise InvalidCandidates("candidates: the accept rule `block` takes chains only")

    def validate_laws(self, vocabulary_size: int) -> None:
        """Raises `InvalidCandidates` unless every candidate has a law that can draw it."""
        if len(self.laws) != len(self):
            raise InvalidCandidates(f"candidates: {len(self)} token_ids but {len(self.laws)} laws")
        for i, (token_id, law) in enumerate(zip(self.token_ids, self.laws, strict=True)):
            if len(law.token_ids) != len(law.weights) or len(set(law.token_ids)) != len(law.token_ids):
                raise InvalidCandidates(f"candidates.laws[{i}] must have one weight for each of its distinct token_ids")
            if any(not 0 <= t < vocabulary_size for t in law.token_ids):
                raise InvalidCandidates(f"candidates.laws[{i}].token_ids must be in [0, {vocabulary_size})")
            if any(not 0 < w < WEIGHT_LIMIT for w in law.weights) or token_id not in law.token_ids:
                raise InvalidCandidates(f"candidates.laws[{i}] must give token {token_id} a weight, each in [1, 2^32)")

    def validate(self, vocabulary_size: int) -> None:
        """Raises `InvalidCandidates` unless this is a tree of at most `MAX_CANDIDATES` ids in [0, vocabulary_size)."""
        ids, count = self.token_ids, len(self.token_ids)
        if count != len(self.parents):
            raise InvalidCandidates(f"candidates: {count} token_ids but {len(self.parents)} parents")
        if self.confidences and len(self.confidences) != count:
            raise InvalidCandidates(f"candidates: {count} token_ids but {len(self.confidences)} confidences")
        if [confidence for confidence in self.confidences if not 0 <= confidence <= 1]:
            raise InvalidCandidates("candidates.confidences must be in [0, 1]")
        if count > MAX_CANDIDATES:
            raise InvalidCandidates(f"candidates: {count} in one block, at most {MAX_CANDIDATES}")
        if self.is_chain and (not ids or 0 <= min(ids) <= max(ids) < vocabulary_size):
            return  # most are
        for i, (token_id, parent) in enumerate(zip(ids, self.parents, strict=True)):
            if not 0 <= token_id < vocabulary_size:
                raise InvalidCandidates(f"candidates.token_ids[{i}] is {token_id}, must be in [0, {vocabulary_size})")
            if not ROOT <= parent < i:
                raise InvalidCandidates(f"candidates.parents[{i}] is {parent}, must be in [-1, {i})")


EMPTY = CandidateTree()
"""No candidates: verifying it is a plain step."""
