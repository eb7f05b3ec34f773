"""The figures of an answer: OpenAI's usage, and vLLM's object on speculation."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.request import SpeculationSummary
from services.generation import ChoiceFinished
from services.http.token_text import Json


def usage(finished: Sequence[ChoiceFinished], choices_per_prompt: int) -> Json:
    """finished: of all choices, by index. A prompt counts once, however many choices it has."""
    prompt = sum(choice.prompt_tokens for choice in finished[::choices_per_prompt])
    completion = sum(choice.completion_tokens for choice in finished)
    accepted = sum(choice.speculation.num_accepted_tokens for choice in finished)
    drafted = sum(choice.speculation.num_draft_tokens for choice in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def metrics(finished: Sequence[ChoiceFinished]) -> Json:
    """speculative_decoding: null if nothing was drafted."""
    return {"speculative_decoding": _speculative_decoding([choice.speculation for choice in finished])}


def _speculative_decoding(summaries: Sequence[SpeculationSummary]) -> Json | None:
    """Over all choices. acceptance_histogram[i]: steps in which i candidates were accepted."""
    drafted = [count for summary in summaries for count in summary.drafted_per_step]
    accepted = [count for summary in summaries for count in summary.accepted_per_step]
    if not drafted:
        return None
    longest = max(drafted)
    committed = sum(summary.num_speculative_tokens for summary in summaries)
    return {
        "mean_acceptance_length": committed / len(drafted),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": [accepted.count(length) for length in range(longest + 1)],
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": longest,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }
