"""The benchmarks by name, in the order in which they run and are shown. No benchmark is imported for this."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from bench.session import Result, Session


@dataclass(frozen=True, slots=True)
class Entry:
    """minutes: what it may take by default. in_default_set: whether `make bench` runs it."""

    summary: str
    minutes: float
    in_default_set: bool = True


class Bench(Protocol):
    """What each module `bench.NAME` has. Its docstring is what --help says."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace, session: Session) -> Result: ...


BENCHES: dict[str, Entry] = {
    "pair": Entry("HumanEval on the Qwen pair: ours and transformers', peers if asked for", 10),
    "bound": Entry("the Qwen pair against what the bare engine allows", 3),
    "sampled": Entry("drawing at a temperature against greedy, on the Qwen pair", 4, False),
    "categories": Entry("Spec-Bench on the Qwen pair, category by category", 6),
    "latency": Entry("time to the first token and per token, SmolLM2", 1.5),
    "load": Entry("1 to 64 concurrent requests, SmolLM2, against transformers, vLLM if asked for", 3.5),
    "batch": Entry("the goodput policy against every fixed length at batch 1 to 64, SmolLM2", 8, False),
    "anti": Entry("a drafter that is always wrong, against plain", 3),
    "window": Entry("drafting ahead against stop-and-wait, with delayed links; table models", 3),
    "switching": Entry("acceptance 0.9, then 0.05, then 0.9 again; table models", 1.5),
    "capacity": Entry("CPU time and overhead per round of one scheduler process, 64 sequences; table models", 1.5),
    "rounds": Entry("overhead per round of scheduler and gRPC, one and 16 sequences; table models", 1),
    "engine": Entry("the engine's forward against the stock model's", 2),
    "acceptance": Entry("acceptance of the three accept rules on the Qwen pair", 5, False),
    "telemetry": Entry("throughput and overhead with telemetry on and off; table models", 4, False),
}


def load(name: str) -> Bench:
    return cast(Bench, importlib.import_module(f"bench.{name}"))
