"""Prompt lookup: candidates are what followed the last occurrence of the log's tail, found in the log itself.

Needs no model and no torch, fits every target, and pays where the text repeats its prompt (Saxena, "Prompt Lookup
Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.candidates import CandidateTree, DraftLaw
from specdec.drafter import Abandoned, DraftJob, never
from specdec.log import Log
from specdec.params import AcceptRule


class NgramDrafter:
    """Looks for the longest tail of `max_ngram` down to `min_ngram` tokens that occurred before."""

    name = "ngram"
    context_length = 0

    def __init__(self, min_ngram: int = 2, max_ngram: int = 4) -> None:
        """Raises ValueError unless 1 <= min_ngram <= max_ngram."""
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"ngram_min is {min_ngram} and ngram_max {max_ngram}, must be 1 <= ngram_min <= ngram_max")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._indexes: dict[str, _Index] = {}

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        return [self._propose(job) for job in jobs]

    def release(self, sequence_id: str) -> None:
        self._indexes.pop(sequence_id, None)

    def _propose(self, job: DraftJob) -> CandidateTree:
        index = self._indexes.setdefault(job.sequence_id, _Index(self._sizes))
        index.realign(job.log)
        branches: list[list[int]] = []
        for start in index.continuations(job.log.token_ids, job.width):
            branches.append(_continuation(job.log.token_ids, start, job.draft_length))
        tree = merge_branches(branches, job.width)
        if job.sampling.accept_rule is not AcceptRule.INVARIANT:  # nothing was drawn: each candidate was certain
            tree = replace(tree, laws=tuple(DraftLaw.certain(token_id) for token_id in tree.token_ids))
        return tree


class _Index:
    """Where each n-gram of one log last ended, and before that: positions of the token that followed it."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._follows: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0
        self._digest: bytes | None = None

    def realign(self, log: Log) -> None:
        """Indexes what is new. A log that is no continuation of what was indexed is indexed afresh."""
        if self._indexed > len(log) or self._digest != log.digest_at(self._indexed):
            self._follows.clear()
            self._indexed = 0
        for position in range(max(self._indexed, 1), len(log)):
            for size in self._sizes:
                if size <= position:
                    self._follows.setdefault(tuple(log.token_ids[position - size : position]), []).append(position)
        self._indexed = len(log)
        self._digest = log.digest

    def continuations(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Up to `count` positions that followed the log's tail before, longest tail first, then the latest."""
        found: list[int] = []
        for size in self._sizes:
            for position in reversed(self._follows.get(tuple(token_ids[len(token_ids) - size :]), ())):
                if position not in found:
                    found.append(position)
                if len(found) == count:
                    return found
        return found


def _continuation(token_ids: Sequence[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start`; where the log ends, the copy goes on with what was just copied (a loop)."""
    copied: list[int] = []
    for offset in range(length):
        position = start + offset
        copied.append(token_ids[position] if position < len(token_ids) else copied[position - len(token_ids)])
    return copied


def merge_branches(branches: Sequence[Sequence[int]], width: int) -> CandidateTree:
    """One tree of the first `width` branches, their common beginnings merged."""
    token_ids: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    for branch in branches[:width]:
        parent = -1
        for token_id in branch:
            node = nodes.get((parent, token_id))
            if node is None:
                node = nodes[parent, token_id] = len(token_ids)
                token_ids.append(token_id)
                parents.append(parent)
            parent = node
    return CandidateTree(tuple(token_ids), tuple(parents))
