"""Candidate trees: what a drafter proposes and a target verifies.

A *candidate* is a proposed token. Candidates are always a tree over the committed prefix; a chain is the tree with one
branch. `parents[i] < i`, so a tree is read from the root outwards in index order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT = -1
"""The parent of a candidate that follows the committed prefix directly."""

MAX_CANDIDATES = 256
"""Candidates in one block at most. More could not pay, and it bounds what a worker must hold."""


class InvalidCandidates(ValueError):
    """The candidates are no tree, or a token id is not in the vocabulary."""


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """`token_ids[i]` follows candidate `parents[i]`, or the committed prefix where that is `ROOT`."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

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
        return max(self.depths, default=-1) + 1

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    def children(self, parent: int) -> list[int]:
        """Candidates that follow `parent`, in index order."""
        return [i for i, p in enumerate(self.parents) if p == parent]

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
        frontier = {ROOT}
        for token_id in token_ids:
            frontier = {i for i, p in enumerate(self.parents) if p in frontier and self.token_ids[i] == token_id}
            if not frontier:
                return None
        new_index = dict.fromkeys(frontier, ROOT)
        ids: list[int] = []
        parents: list[int] = []
        for i, parent in enumerate(self.parents):
            if parent in new_index and i not in new_index:
                new_index[i] = len(ids)
                ids.append(self.token_ids[i])
                parents.append(new_index[parent])
        return CandidateTree(tuple(ids), tuple(parents))

    def trimmed(self, max_depth: int) -> CandidateTree:
        """Only the candidates on the first `max_depth` levels."""
        keep = [i for i, depth in enumerate(self.depths) if depth < max_depth]
        new_index = {old: new for new, old in enumerate(keep)} | {ROOT: ROOT}
        return CandidateTree(tuple(self.token_ids[i] for i in keep), tuple(new_index[self.parents[i]] for i in keep))

    def validate(self, vocabulary_size: int) -> None:
        """Raises `InvalidCandidates` unless this is a tree of at most `MAX_CANDIDATES` ids in [0, vocabulary_size)."""
        if len(self.token_ids) != len(self.parents):
            raise InvalidCandidates(f"candidates: {len(self.token_ids)} token_ids but {len(self.parents)} parents")
        if len(self) > MAX_CANDIDATES:
            raise InvalidCandidates(f"candidates: {len(self)} in one block, at most {MAX_CANDIDATES}")
        for i, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if not 0 <= token_id < vocabulary_size:
                raise InvalidCandidates(f"candidates.token_ids[{i}] is {token_id}, must be in [0, {vocabulary_size})")
            if not ROOT <= parent < i:
                raise InvalidCandidates(f"candidates.parents[{i}] is {parent}, must be in [-1, {i})")


EMPTY = CandidateTree()
"""No candidates: verifying it is a plain step."""
