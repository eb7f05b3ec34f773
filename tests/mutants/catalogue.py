"""Every mutant and the test that must notice it."""

from __future__ import annotations

from mutants import invariant_faults, ratio_faults
from mutants.mutant import Mutant, NamedTest


def _cell(shape: str, parameters: str) -> NamedTest:
    return NamedTest("test_law_draws", "test_draws_follow_the_law", (shape, parameters))


def _exact(rule: str) -> NamedTest:
    return NamedTest("test_law_exact", f"test_{rule}_is_exact_on_one_case")


FAULTY_SAMPLERS = [
    Mutant("target law for the residual", ratio_faults.target_for_residual, _cell("rejection", "T 1.0"), quick=True),
    Mutant("|p - q| for the residual", ratio_faults.absolute_residual, _cell("rejection", "T 1.0")),
    Mutant("greedy draft, softmax sent", ratio_faults.greedy_draft, _cell("rejection", "T 1.0")),
    Mutant("draft_probs of another temperature", ratio_faults.other_temperature, _cell("rejection", "T 1.0")),
    Mutant("draft_probs without the draft's top-k", ratio_faults.without_top_k, _cell("rejection", "T 1.0")),
    Mutant("filter forgotten", ratio_faults.verified_with(top_k=0), _cell("rejection", "top-k 5")),
    Mutant("min_p forgotten", ratio_faults.verified_with(min_p=0.0), _cell("rejection", "min-p 0.1")),
    Mutant("bias dropped", ratio_faults.verified_with(logit_bias=((1, -100.0),)), _cell("rejection", "bias")),
    Mutant(
        "penalties missed",
        ratio_faults.verified_with(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
        _cell("rejection", "penalties"),
    ),
    Mutant("verify row shifted by one", ratio_faults.row_shifted, _cell("rejection", "T 1.0")),
    Mutant("temperature ignored", ratio_faults.verified_with(temperature=1.0), _cell("rejection", "T 0.3")),
    Mutant("stale draft_probs", ratio_faults.stale_draft_probs, _cell("rejection", "T 1.0")),
    Mutant("candidate dropped for its probability", ratio_faults.doubtful_dropped, _cell("rejection", "T 1.0")),
    Mutant(
        "bf16 draw, fp32 draft_probs",
        ratio_faults.bf16_draw,
        NamedTest("test_law_contract", "test_what_is_sent_is_what_was_drawn_from"),
        quick=True,
    ),
]

INVARIANT_FAULTS = [
    Mutant("noise reused at two positions", invariant_faults.noise_reused, _cell("invariant", "T 1.0")),
    Mutant(
        "one noise for all unseeded requests",
        invariant_faults.one_noise_for_all,
        NamedTest("test_law_contract", "test_unseeded_requests_differ"),
        quick=True,
    ),
    Mutant(
        "accept without equality",
        invariant_faults.accept_without_equality,
        NamedTest("test_law_invariant", "test_any_tree_gives_the_argmax_of_every_plain_step"),
        quick=True,
    ),
]

FURTHER_FAULTS = [
    Mutant("block: target law for the residual", ratio_faults.target_for_residual, _cell("block", "T 1.0")),
    Mutant("block: |p - q| for the residual", ratio_faults.absolute_residual, _exact("block")),
    Mutant("block: residual of `rejection`", ratio_faults.residual_without_weight, _exact("block"), quick=True),
    Mutant("block: verify row shifted by one", ratio_faults.block_row_shifted, _cell("block", "T 1.0")),
    Mutant("block: greedy draft", ratio_faults.greedy_draft, _cell("block", "T 1.0")),
    Mutant("tree: target law for the residual", ratio_faults.target_for_residual, _cell("rejection width 3", "T 1.0")),
    Mutant(
        "penalties count the log only",
        invariant_faults.block_has_one_history,
        NamedTest("test_law_processors", "test_each_row_follows_its_own_path"),
        quick=True,
    ),
]

MUTANTS = [*FAULTY_SAMPLERS, *INVARIANT_FAULTS, *FURTHER_FAULTS]
