"""How the scheduler does at this moment, read when somebody looks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from scheduler import counters as metrics
from scheduler.counters import Metric
from scheduler.driver import Driver
from scheduler.worker import Worker, WorkerState
from specdec.messages import Role
from specdec.metric import Labels, Readings


def read_gauges(drivers: Iterable[Driver], workers: Iterable[Worker]) -> Mapping[Metric, Readings]:
    """Of every gauge of the scheduler itself, its values now."""
    now = time.monotonic()
    modes: Counter[Labels] = Counter()
    waiting = 0
    for driver in drivers:
        if driver.target is None or driver.waits_for_room:
            waiting += 1
        else:
            modes[("speculative" if driver.speculates else "plain",)] += 1
    workers = list(workers)
    states: Counter[Labels] = Counter((worker.role.value, worker.shown_state(now).value) for worker in workers)
    drafters = [worker for worker in workers if worker.role is Role.DRAFT and worker.state is WorkerState.READY]
    links: Readings = {(worker.name,): link for worker in drafters if (link := worker.drafter_model.link)}
    return {
        metrics.REQUESTS_RUNNING: {(): modes.total()},
        metrics.REQUESTS_WAITING: {(): waiting},
        metrics.SEQUENCES: modes,
        metrics.WORKERS: states,
        metrics.DRAFT_LINK_TIME: links,
    }
