"""Steps of a target worker, put together from what its sequences were told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from scheduler.driver import Driver
from scheduler.worker import AnyResult
from specdec.costs import TargetStep
from specdec.messages import Committed, Prefilled


def target_steps(results: Sequence[AnyResult], drivers: Mapping[str, Driver]) -> Iterator[TargetStep]:
    """One per step that only decided tokens: those that also prefilled say nothing about verifying. Sequences of other
    schedulers in the step are taken to be like ours."""
    if any(isinstance(result.body, Prefilled) for result in results):
        return
    by_time: defaultdict[float, list[tuple[int, Committed, Driver]]] = defaultdict(list)
    for result in results:
        driver = drivers.get(result.header.sequence_id)
        body = result.body
        if driver is not None and isinstance(body, Committed) and body.step_time > 0 and not body.repeated_answer:
            by_time[body.step_time].append((result.header.base_length, body, driver))
    for seconds, parts in by_time.items():
        if any(base == driver.opened_length for base, _, driver in parts):
            continue  # the first step of a sequence computes what its prefill left
        share = max(parts[0][1].batch_size, len(parts)) / len(parts)
        yield TargetStep(
            seconds,
            round(share * sum(1 + body.num_draft_tokens for _, body, _ in parts)),
            round(share * sum(base for base, _, _ in parts)),
            max(parts[0][1].batch_size, len(parts)),
            round(share * sum(len(body.token_ids) for _, body, _ in parts)),
            any(driver.drafts_ahead for _, _, driver in parts),
        )
