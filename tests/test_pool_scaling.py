"""When a role gets another worker and when it loses one, by a clock of the test."""

from __future__ import annotations

from outrider.v1 import control_service_pb2 as control
from outrider.v1 import types_pb2 as types
from services.pools.fleet import Meter
from services.pools.placement import Reservation, groups
from services.pools.scaling import DOWN_SECONDS, UP_SECONDS, WEIGH_SECONDS, Bounds, Demand, RoleScaler
from services.pools.worker import WorkerSpec
from services.settings import DraftSettings, TargetSettings, load

BOUNDS = Bounds(fewest=1, most=3, sequences=4)


class Clock:
    """Asks the scaler once a second."""

    def __init__(self, scaler: RoleScaler) -> None:
        self._scaler = scaler
        self._now = 100.0

    def ask(self, seconds: float, workers: int, sequences: int, goodput: float = 100.0) -> int:
        """What is wanted after so many seconds of the same demand."""
        wanted = self._scaler.wanted(Demand(workers, sequences, goodput), self._now)
        for _ in range(int(seconds)):
            self._now += 1.0
            wanted = self._scaler.wanted(Demand(workers, sequences, goodput), self._now)
        return wanted


def test_a_queue_that_lasts_brings_one_worker_more() -> None:
    clock = Clock(RoleScaler(BOUNDS))
    assert clock.ask(UP_SECONDS - 1, workers=1, sequences=5) == 1
    assert clock.ask(1, workers=1, sequences=5) == 2
    assert clock.ask(3 * UP_SECONDS, workers=1, sequences=50) == 2, "the second one still loads"


def test_a_burst_brings_none() -> None:
    clock = Clock(RoleScaler(BOUNDS))
    for _ in range(5):
        assert clock.ask(UP_SECONDS - 2, workers=1, sequences=9) == 1
        assert clock.ask(1, workers=1, sequences=4) == 1


def test_there_are_never_more_than_allowed_nor_fewer() -> None:
    clock = Clock(RoleScaler(BOUNDS))
    for workers in (1, 2, 3, 3):
        clock.ask(UP_SECONDS + WEIGH_SECONDS + 2, workers=workers, sequences=100, goodput=100.0 * workers)
    assert clock.ask(60, workers=3, sequences=100, goodput=300.0) == 3
    for workers in (3, 2, 1):
        wanted = clock.ask(DOWN_SECONDS + 1, workers=workers, sequences=0, goodput=0.0)
    assert wanted == 1


def test_a_worker_that_brings_no_goodput_is_taken_back_until_demand_falls() -> None:
    clock = Clock(RoleScaler(BOUNDS))
    assert clock.ask(UP_SECONDS, workers=1, sequences=9, goodput=100.0) == 2
    assert clock.ask(WEIGH_SECONDS + 1, workers=2, sequences=9, goodput=101.0) == 1
    assert clock.ask(10 * UP_SECONDS, workers=1, sequences=9, goodput=100.0) == 1
    clock.ask(1, workers=1, sequences=2, goodput=50.0)
    assert clock.ask(UP_SECONDS + 1, workers=1, sequences=9, goodput=100.0) == 2


def test_a_worker_that_brings_goodput_stays() -> None:
    clock = Clock(RoleScaler(BOUNDS))
    clock.ask(UP_SECONDS, workers=1, sequences=8, goodput=100.0)
    assert clock.ask(WEIGH_SECONDS + 30, workers=2, sequences=8, goodput=180.0) == 2


def test_a_lost_worker_is_no_reason_to_scale() -> None:
    clock = Clock(RoleScaler(Bounds(fewest=2, most=4, sequences=4)))
    assert clock.ask(3 * UP_SECONDS, workers=1, sequences=20) == 2


def worker(role: types.WorkerRole.ValueType, address: str, sequences: int, tokens: int) -> control.WorkerStatus:
    return control.WorkerStatus(
        identity=control.WorkerIdentity(role=role),
        address=address,
        state=control.WORKER_STATE_READY,
        load=control.WorkerLoad(sequences=sequences, tokens=tokens),
    )


def test_demand_is_read_from_what_the_scheduler_tells() -> None:
    meter = Meter()

    def read(tokens: tuple[int, int], now: float) -> dict[str, Demand]:
        status = control.GetStatusResponse(
            workers=[
                worker(types.WORKER_ROLE_TARGET, "a", 3, tokens[0]),
                worker(types.WORKER_ROLE_TARGET, "b", 2, tokens[1]),
                worker(types.WORKER_ROLE_DRAFT, "c", 4, 1000),
            ],
            active_sequences=9,
        )
        return meter.read(status, now)

    read((100, 100), 10.0)
    demand = read((140, 160), 12.0)
    assert demand["target"] == Demand(workers=2, sequences=9, goodput=50.0)
    assert demand["draft"] == Demand(workers=1, sequences=4, goodput=50.0)
    assert read((150, 5), 14.0)["target"].goodput == 5.0, "a counter that starts anew is no loss"


def specs(targets: int, drafts: int) -> list[WorkerSpec]:
    return [
        *(WorkerSpec(load(TargetSettings, None, {"worker_id": f"target-{i + 1}"}).settings) for i in range(targets)),
        *(WorkerSpec(load(DraftSettings, None, {"worker_id": f"draft-{i + 1}"}).settings) for i in range(drafts)),
    ]


def test_a_pair_lies_together_and_what_has_no_partner_alone() -> None:
    names = [[spec.name for spec in members] for members in groups(specs(2, 1))]
    assert names == [["target-1", "draft-1"], ["target-2"]]
    assert [[spec.name for spec in members] for members in groups(specs(1, 2))][-1] == ["draft-2"]


def test_what_is_reserved_follows_device_threads_and_ranks() -> None:
    cuda = load(TargetSettings, None, {"device": "cuda", "threads": 4, "tensor_parallel": 2}).settings
    assert Reservation.of(cuda, None, cluster=True) == Reservation(8.0, 2.0)
    draft = load(DraftSettings, None, {"device": "cuda"}).settings
    assert Reservation.of(draft, 0.5, cluster=True) == Reservation(1.0, 0.5)
    assert Reservation.of(load(DraftSettings).settings, None, cluster=True).resources == {"CPU": 1.0}
