"""What both workers' loops do when they fail."""

from __future__ import annotations

from specdec.messages import Identity, Role
from specdec.worker import Outgoing, Worker


class _Failing(Worker[int, int]):
    def drain(self) -> None:
        """Nothing is open."""

    def _turn(self, outgoing: Outgoing[int]) -> bool:
        raise RuntimeError("planted")

    def _idle_for(self) -> float | None:
        return None


def test_a_loop_that_fails_says_so_and_can_be_stopped() -> None:
    worker = _Failing(Identity("w", Role.DRAFT, "m"))
    worker.start()
    worker.stop()
    assert str(worker.crash) == "planted"
