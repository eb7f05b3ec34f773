"""What workers ask Ray for, and which of them belong on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.pools.worker import WorkerSpec
from services.settings import TargetSettings, WorkerSettings

OWN_MACHINE_CPUS = 0.01
"""On a machine of its own workers take turns on all cores, which Ray's counting of cores would forbid."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Of one worker. gpus: below 1, workers share a GPU."""

    cpus: float
    gpus: float = 0.0

    @property
    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    @classmethod
    def of(cls, settings: WorkerSettings, gpus: float | None, cluster: bool) -> Reservation:
        """cluster: Ray counts the cores of machines that others use too."""
        ranks = getattr(settings, "tensor_parallel", 1)
        cpus = float(ranks * (settings.threads or 1)) if cluster else OWN_MACHINE_CPUS
        if gpus is None:
            gpus = float(ranks) if settings.device.startswith("cuda") else 0.0
        return cls(cpus, gpus)


@dataclass(frozen=True, slots=True)
class RayOptions:
    """address: of a cluster to join; None: Ray is started on this machine and ends with the deployment."""

    address: str | None
    target: Reservation
    draft: Reservation

    def of(self, spec: WorkerSpec) -> Reservation:
        return self.target if isinstance(spec.settings, TargetSettings) else self.draft


@dataclass(frozen=True, slots=True)
class Bundle:
    """Workers on one machine, and what they need together."""

    names: tuple[str, ...]
    resources: Mapping[str, float]


def bundles(specs: Sequence[WorkerSpec], options: RayOptions) -> list[Bundle]:
    """A target and a draft worker in each, as far as there are pairs: they lie side by side, and Ray spreads the
    bundles."""
    targets = [spec for spec in specs if isinstance(spec.settings, TargetSettings)]
    drafts = [spec for spec in specs if not isinstance(spec.settings, TargetSettings)]
    pairs = [list(pair) for pair in zip(targets, drafts, strict=False)]
    rest = [[spec] for spec in (*targets[len(pairs) :], *drafts[len(pairs) :])]
    return [
        Bundle(tuple(spec.name for spec in members), _sum([options.of(spec).resources for spec in members]))
        for members in (*pairs, *rest)
    ]


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total
