"""Candidates, the accept rule, commit and the log: each is exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import digest as digests
from specdec.accept import accept_invariant
from specdec.candidates import EMPTY, ROOT, CandidateTree, InvalidCandidates
from specdec.commit import FinishReason, TokenSource, commit
from specdec.digest import DIGEST_BYTES, root_digest
from specdec.log import Log, Place
from specdec.observations import outcome
from specdec.params import StopConditions

A, C, B, P = TokenSource.ACCEPTED, TokenSource.CORRECTION, TokenSource.BONUS, TokenSource.PLAIN

#        5 ── 6
#  root ─┤    └ 7 ── 8
#        9
TREE = CandidateTree((5, 6, 7, 8, 9), (-1, 0, 0, 2, -1))


@st.composite
def trees(draw: st.DrawFn) -> CandidateTree:
    count = draw(st.integers(0, 12))
    token_ids = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    return CandidateTree(tuple(token_ids), tuple(parents))


def test_a_chain_is_a_tree_with_one_branch() -> None:
    chain = CandidateTree.chain([4, 5, 6])
    assert chain.parents == (-1, 0, 1)
    assert chain.is_chain
    assert chain.draft_length == 3
    assert EMPTY.draft_length == 0


def test_depths_paths_and_children() -> None:
    assert TREE.depths == (0, 1, 1, 2, 0)
    assert TREE.path(3) == [0, 2, 3]
    assert TREE.path(ROOT) == []
    assert TREE.children(ROOT) == [0, 4]
    assert TREE.draft_length == 3
    assert not TREE.is_chain


def test_below_keeps_what_lies_under_the_path() -> None:
    assert TREE.below([5]) == CandidateTree((6, 7, 8), (-1, -1, 1))
    assert TREE.below([9]) == EMPTY
    assert TREE.below([6]) is None
    assert TREE.below([]) == TREE


def test_below_merges_equal_siblings() -> None:
    twins = CandidateTree((1, 1, 2, 3), (-1, -1, 0, 1))
    assert twins.below([1]) == CandidateTree((2, 3), (-1, -1))


def test_trimmed_keeps_the_first_levels() -> None:
    assert TREE.trimmed(1) == CandidateTree((5, 9), (-1, -1))
    assert TREE.trimmed(0) == EMPTY
    assert TREE.trimmed(9) == TREE


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (CandidateTree((1,), ()), "1 token_ids but 0 parents"),
        (CandidateTree((10,), (-1,)), "token_ids[0] is 10, must be in [0, 10)"),
        (CandidateTree((-1,), (-1,)), "token_ids[0] is -1"),
        (CandidateTree((1, 2), (-1, 1)), "parents[1] is 1, must be in [-1, 1)"),
        (CandidateTree((1,), (-2,)), "parents[0] is -2"),
        (CandidateTree.chain([1] * 257), "257 in one block, at most 256"),
    ],
)
def test_no_tree_is_refused_by_name(tree: CandidateTree, problem: str) -> None:
    with pytest.raises(InvalidCandidates) as caught:
        tree.validate(10)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "target_tokens", "token_ids", "sources"),
    [
        (EMPTY, [4], (4,), (P,)),
        (CandidateTree.chain([5, 6]), [5, 6, 7], (5, 6, 7), (A, A, B)),
        (CandidateTree.chain([5, 6]), [5, 1, 7], (5, 1), (A, C)),
        (CandidateTree.chain([5, 6]), [1, 6, 7], (1,), (C,)),
        (TREE, [5, 7, 0, 8, 2, 0], (5, 7, 8, 2), (A, A, A, B)),
        (TREE, [9, 0, 0, 0, 0, 3], (9, 3), (A, B)),
        (TREE, [4, 0, 0, 0, 0, 0], (4,), (C,)),
    ],
)
def test_invariant_walks_down_while_a_child_is_the_targets_token(
    tree: CandidateTree, target_tokens: list[int], token_ids: tuple[int, ...], sources: tuple[TokenSource, ...]
) -> None:
    accepted = accept_invariant(tree, target_tokens)
    assert accepted.token_ids == token_ids
    assert accepted.sources == sources
    assert len(accepted.nodes) == len(token_ids) - 1


@given(trees(), st.lists(st.integers(0, 3), min_size=13, max_size=13), st.integers(0, 2**32))
def test_no_tree_steers_the_output(tree: CandidateTree, target: list[int], salt: int) -> None:
    """The target's token is a function of what stands before it; whatever is proposed, the output is the same."""

    def target_token(prefix: tuple[int, ...]) -> int:
        return target[hash((salt, prefix)) % len(target)]

    at_root = target_token(())
    behind = [target_token(tuple(tree.token_ids[n] for n in tree.path(i))) for i in range(len(tree))]
    accepted = accept_invariant(tree, [at_root, *behind]).token_ids
    plain: tuple[int, ...] = ()
    while len(plain) < len(accepted):
        plain = (*plain, target_token(plain))
    assert accepted == plain


@given(trees(), st.lists(st.integers(0, 3), max_size=4))
def test_below_and_walk_agree(tree: CandidateTree, token_ids: list[int]) -> None:
    below, node = tree.below(token_ids), tree.walk(token_ids)
    assert (below is None) == (node is None)
    if below is not None and node not in (None, ROOT):
        below.validate(4)
        assert set(below.token_ids) >= {tree.token_ids[child] for child in tree.children(node)}


def _stop(**changes: object) -> StopConditions:
    settings: dict[str, object] = {"prompt_length": 4, "max_length": 10, "stop_token_ids": frozenset({2})}
    return StopConditions(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("token_ids", "stop", "context", "expected", "reason"),
    [
        ([7, 8], _stop(), 100, (7, 8), None),
        ([7, 2, 8], _stop(), 100, (7, 2), FinishReason.STOP),
        ([7, 2, 8], _stop(min_length=6), 100, (7, 2, 8), None),
        ([7, 2, 8], _stop(min_length=5), 100, (7, 2), FinishReason.STOP),
        ([1] * 9, _stop(), 100, (1,) * 6, FinishReason.LENGTH),
        ([1] * 9, _stop(), 7, (1,) * 3, FinishReason.LENGTH),
        ([1, 1, 1, 1, 1, 2, 1], _stop(), 100, (1, 1, 1, 1, 1, 2), FinishReason.STOP),  # stop before budget
        ([2], _stop(max_length=5), 5, (2,), FinishReason.STOP),
    ],
)
def test_commit_applies_stop_then_budget_then_context(
    token_ids: list[int],
    stop: StopConditions,
    context: int,
    expected: tuple[int, ...],
    reason: FinishReason | None,
) -> None:
    committed = commit(4, token_ids, stop, context)
    assert committed.token_ids == expected
    assert committed.finish_reason is reason


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(1, 4), min_size=1))
def test_commit_in_blocks_is_commit_token_by_token(token_ids: list[int], cuts: list[int]) -> None:
    stop = _stop(min_length=6)

    def run(sizes: list[int]) -> tuple[list[int], FinishReason | None]:
        done: list[int] = []
        rest = list(token_ids)
        while rest:
            size = sizes[len(done) % len(sizes)]
            block, rest = rest[:size], rest[size:]
            committed = commit(4 + len(done), block, stop, 100)
            done += committed.token_ids
            if committed.finish_reason:
                return done, committed.finish_reason
        return done, None

    assert run(cuts) == run([1])


def test_the_log_judges_every_base() -> None:
    log = Log(root_digest(b"secret", "model"), [1, 2, 3], b"secret")
    assert len(log.digest) == DIGEST_BYTES
    assert log.place(3, log.digest) is Place.HERE
    assert log.place(1, log.digest_at(1)) is Place.HERE
    assert log.place(1, log.digest_at(2)) is Place.STALE
    assert log.place(4, log.digest) is Place.BEYOND
    log.append([4])
    assert log.since(2) == [3, 4]


def test_digests_depend_on_secret_model_tenant_and_every_token() -> None:
    def digest(secret: bytes = b"s", model: str = "m", salt: str = "", ids: tuple[int, ...] = (1, 2)) -> bytes:
        return Log(root_digest(secret, model, salt), ids, secret).digest

    others = [digest(b"t"), digest(model="n"), digest(salt="x"), digest(ids=(2, 1)), digest(ids=(1, 2, 0))]
    assert len({digest(), *others}) == 6
    assert digest() == digest()
    assert root_digest(b"s", "ab", "c") != root_digest(b"s", "a", "bc")


def test_rolling_back_and_appending_again_gives_the_same_digest() -> None:
    log = Log(root_digest(b"", "m"), [1, 2, 3])
    before = log.digest
    log.append([8, 9])
    log.roll_back(3)
    assert log.digest == before
    assert log.token_ids == [1, 2, 3]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=5), st.binary(max_size=80))
def test_a_chain_of_digests_is_one_extended_token_by_token(token_ids: list[int], secret: bytes) -> None:
    digest = root_digest(secret, "model")
    expected: list[bytes] = []
    for token_id in token_ids:
        expected.append(digests.extend(expected[-1] if expected else digest, token_id, secret))
    assert digests.chain(digest, token_ids, secret) == expected


@given(st.lists(st.integers(0, 1), max_size=5), st.lists(st.integers(0, 1), max_size=7))
def test_a_chain_is_judged_as_any_tree_is(candidates: list[int], token_ids: list[int]) -> None:
    chain = CandidateTree.chain(candidates)
    quick = outcome(chain, token_ids), chain.below(token_ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CandidateTree, "is_chain", property(lambda tree: False))
        assert (outcome(chain, token_ids), chain.below(token_ids)) == quick
