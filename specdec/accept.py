"""The accept rule: which candidates become committed tokens.

*accepted* a candidate that equals the target's own token; *correction* the target's token at the first position where
no candidate equals it; *bonus* the target's token behind the last candidate of a fully accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.candidates import ROOT, CandidateTree
from specdec.commit import TokenSource


@dataclass(frozen=True, slots=True)
class Accepted:
    """nodes: the accepted candidates, a path from the root. token_ids: theirs and one more of the target's."""

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]


def accept_invariant(candidates: CandidateTree, target_tokens: Sequence[int]) -> Accepted:
    """Walks down the tree while a child equals the target's token. Greedy is the case of temperature 0.

    target_tokens: [1 + len(candidates)]; the first is the target's token behind the committed prefix, number 1 + i the
    one behind candidate i. The result is a function of the target's tokens alone: a drafter can waste time, but it can
    never steer the output (arXiv 2408.07978).
    """
    node = ROOT
    nodes: list[int] = []
    while True:
        wanted = target_tokens[1 + node]
        children = candidates.children(node)
        accepted = next((child for child in children if candidates.token_ids[child] == wanted), None)
        if accepted is None:
            break
        nodes.append(accepted)
        node = accepted
    if not len(candidates):
        last = TokenSource.PLAIN
    else:
        last = TokenSource.CORRECTION if children else TokenSource.BONUS
    token_ids = [candidates.token_ids[i] for i in nodes]
    return Accepted(tuple(nodes), (*token_ids, target_tokens[1 + node]), (*[TokenSource.ACCEPTED] * len(nodes), last))
