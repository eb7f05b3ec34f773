"""What workers ask Ray for, and which of them belong on one machine."""

from __future__ import annotations

from collections.abc import Sequence
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


def groups(specs: Sequence[WorkerSpec]) -> list[list[WorkerSpec]]:
    """Workers that belong on one machine: a target with a draft worker, as far as there are pairs; the rest alone.

    Each is a placement group that is packed. Ray gives a new group to the node with the most left, which spreads them.
    """
    targets = [spec for spec in specs if isinstance(spec.settings, TargetSettings)]
    drafts = [spec for spec in specs if not isinstance(spec.settings, TargetSettings)]
    pairs = [list(pair) for pair in zip(targets, drafts, strict=False)]
    return [*pairs, *([spec] for spec in (*targets[len(pairs) :], *drafts[len(pairs) :]))]
