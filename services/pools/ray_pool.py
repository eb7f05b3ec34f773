"""The pool of actors: Ray places them, counts their resources, and starts them again when they or their node die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.pools.placement import RayOptions, groups
from services.pools.pool import OnLine
from services.pools.ray_actor import Event, EventKind, WorkerActor
from services.pools.ray_cluster import RayCluster
from services.pools.worker import WorkerSpec
from services.supervisor import KILL_SECONDS, ChildFailed

ROOM_SECONDS = 5.0
"""After so long without a node that has room, the log says so."""
RETRY_SECONDS = 0.2
LAST_LINES_SECONDS = 1.0


@dataclass(slots=True)
class _Group:
    """A placement group and the workers that lie in it."""

    handle: PlacementGroup
    names: set[str]


@dataclass(slots=True)
class _Placed:
    spec: WorkerSpec
    actor: Any
    group: _Group
    listener: asyncio.Task[None] | None = field(default=None, repr=False)


class RayPool:
    """Implements `Pool` over Ray actors, each of which runs one worker's process (`services.pools.ray_actor`)."""

    def __init__(self, options: RayOptions, folder: Path, on_line: OnLine, say: OnLine) -> None:
        """folder: private; for the files of a Ray of our own."""
        self._options, self._folder = options, folder
        self._on_line, self._say = on_line, say
        self._cluster = RayCluster(options.address, folder)
        self._workers: dict[str, _Placed] = {}
        self._settled = False
        self._connected = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, specs: Sequence[WorkerSpec]) -> None:
        await self._cluster.connect()
        self._connected = True
        self._ask_for_nodes(specs)
        await asyncio.gather(*(self._place(members) for members in groups(specs)))

    def settle(self) -> None:
        self._settled = True
        self.failure.cancel()
        for placed in self._workers.values():
            placed.actor.settle.remote()

    async def add(self, spec: WorkerSpec) -> None:
        self._ask_for_nodes([spec])
        await self._place([spec])

    async def remove(self, name: str, seconds: float) -> None:
        placed = self._workers.pop(name)
        with contextlib.suppress(RayActorError, TimeoutError):
            async with asyncio.timeout(seconds + KILL_SECONDS):
                await placed.actor.end.remote(seconds)
        await self._forget(placed)
        self._ask_for_nodes()

    async def stop(self, seconds: float) -> None:
        await asyncio.gather(*(self.remove(name, seconds) for name in list(self._workers)))

    def kill(self) -> None:
        for placed in self._workers.values():
            ray.kill(placed.actor)

    async def close(self) -> None:
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()  # looked at, so that asyncio does not complain
        for placed in list(self._workers.values()):
            await self._forget(placed)
        await self._cluster.close()

    async def _place(self, members: Sequence[WorkerSpec]) -> None:
        """Starts workers side by side, once some node has room."""
        handle = placement_group([self._options.of(spec).resources for spec in members], strategy="PACK")
        group = _Group(handle, {spec.name for spec in members})
        try:
            await self._wait_for_room(group)
        except asyncio.CancelledError:
            remove_placement_group(handle)
            raise
        for index, spec in enumerate(members):
            self._start_actor(spec, group, index)

    def _ask_for_nodes(self, more: Sequence[WorkerSpec] = ()) -> None:
        """Tells the autoscaler of a cluster what all workers need, those that are still to come included."""
        if self._options.address is None:
            return
        specs = [*(placed.spec for placed in self._workers.values()), *more]
        request_resources(bundles=[self._options.of(spec).resources for spec in specs])

    async def _wait_for_room(self, group: _Group) -> None:
        ready = asyncio.ensure_future(_as_future(group.handle.ready()))
        try:
            done, _ = await asyncio.wait([ready], timeout=ROOM_SECONDS)
            if not done:
                needed = ", ".join(str(dict(bundle)) for bundle in group.handle.bundle_specs)
                for name in sorted(group.names):
                    self._say(name, f"waits for a node with room: {needed}")
            await ready
        finally:
            ready.cancel()

    def _start_actor(self, spec: WorkerSpec, group: _Group, index: int) -> None:
        reservation = self._options.of(spec)
        actor = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=reservation.cpus,
                num_gpus=reservation.gpus,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group.handle, index),
            )
            .remote(spec, self._options.address is not None, self._folder)
        )
        placed = _Placed(spec, actor, group)
        placed.listener = asyncio.create_task(self._listen(placed), name=f"events of {spec.name}")
        self._workers[spec.name] = placed

    async def _listen(self, placed: _Placed) -> None:
        """Passes on what the actor reports. Its first question starts the process, again after a restart."""
        lost = False
        while True:
            try:
                events: list[Event] = await placed.actor.events.remote(self._settled)
            except RayActorError:
                if not lost:
                    self._say(placed.spec.name, "the actor is lost; Ray starts it again")
                lost = True
                await asyncio.sleep(RETRY_SECONDS)
                continue
            lost = False
            for event in events:
                self._report(placed.spec.name, event)

    def _report(self, name: str, event: Event) -> None:
        if event.kind is EventKind.LINE:
            self._on_line(name, event.text)
        elif event.kind is EventKind.SAID:
            self._say(name, event.text)
        elif not self.failure.done():
            self.failure.set_exception(ChildFailed(name, event.code, event.text))

    async def _forget(self, placed: _Placed) -> None:
        """Ends the actor for good, and gives back its place once nobody else lies there."""
        self._workers.pop(placed.spec.name, None)
        if placed.listener is not None:
            placed.listener.cancel()
            await asyncio.gather(placed.listener, return_exceptions=True)
        ray.kill(placed.actor)
        placed.group.names.discard(placed.spec.name)
        if not placed.group.names:
            remove_placement_group(placed.group.handle)


async def _as_future(reference: Any) -> Any:
    return await reference
