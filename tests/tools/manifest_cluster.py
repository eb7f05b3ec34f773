"""A rendered overlay as local processes: each pod has an address of its own in 127.0.0.0/8, each Service too.

What stands in for a cluster: this machine for all nodes, folders for volumes, an address for each name of a Service,
and `commands` for what the images hold. Everything else is as the manifest says it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tools.manifest import ROOT, Json, Manifest, selects
from tools.manifest_names import service_links
from tools.manifest_pod import Pod, Surroundings
from tools.manifest_service import Endpoint, ServicePort
from tools.waiting import until

START_PATIENCE = 120.0
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "COVERAGE_PROCESS_START")


class Cluster:
    """Async context manager: everything is started in it, and gone at its end.

    commands: by name of an image or first word of a command, what to run. seeds: what is copied into volumes at first,
    by name of the claim template.
    """

    def __init__(
        self,
        manifest: Manifest,
        commands: Mapping[str, Sequence[str]],
        seeds: Mapping[str, Path] | None = None,
    ) -> None:
        self.pods: dict[str, list[Pod]] = {}
        """By name of the workload."""
        self.exit_codes: list[int] = []
        """Of containers that were told to end."""
        self.killed: list[str] = []
        """Pods that did not end within their grace period."""
        self._manifest, self._commands, self._seeds = manifest, commands, seeds or {}
        self._brought: list[Json] = []
        # Short, as volumes may hold sockets.
        self._folder = Path(tempfile.mkdtemp(prefix="ok", dir="/tmp"))
        self._network = f"127.{random.randint(2, 250)}.{random.randint(2, 250)}"
        self._numbers = itertools.count(1)
        self._generations = itertools.count(1)
        self._exits = AsyncExitStack()
        self.hosts = {
            service["metadata"]["name"]: f"{self._network}.{next(self._numbers)}"
            for service in manifest.of_kind("Service")
            if service["spec"].get("clusterIP") != "None"
        }
        self._ports: dict[tuple[str, str], ServicePort] = {}

    def bring(self, items: Sequence[Json]) -> None:
        """Objects that a controller makes. Files of Secrets change in running pods too, as a kubelet does it."""
        names = {item["metadata"]["name"] for item in items}
        kept = [item for item in self._manifest.objects if item not in self._brought]
        self._brought = list(items)
        self._manifest = Manifest((*kept, *items))
        for pod in (pod for pods in self.pods.values() for pod in pods):
            pod.refresh_secrets(self._manifest, names)

    async def __aenter__(self) -> Cluster:
        try:
            for service in self._manifest.of_kind("Service"):
                if service["metadata"]["name"] in self.hosts:
                    await self._open_service(service)
            for workload in self.workloads:
                name, replicas = workload["metadata"]["name"], workload["spec"].get("replicas", 1)
                self.pods[name] = [self._make_pod(workload, index) for index in range(replicas)]
            await asyncio.gather(*(pod.start() for pods in self.pods.values() for pod in pods))
            await self.until_ready()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def workloads(self) -> list[Json]:
        return self._manifest.of_kind("Deployment", "StatefulSet")

    def address(self, service: str, port: str) -> str:
        """HOST:PORT of a Service."""
        return self._ports[service, port].address

    async def until_ready(self, name: str | None = None) -> None:
        """Raises TimeoutError with what the pods wrote."""
        pods = [pod for key, pods in self.pods.items() for pod in pods if name in (None, key)]
        try:
            await until(lambda: all(pod.ready for pod in pods), "every pod is ready", START_PATIENCE)
        except TimeoutError as error:
            raise TimeoutError("\n".join([str(error), *(f"{pod.name}:\n{pod.log()}" for pod in pods)])) from None

    async def restart(self, name: str) -> None:
        """`kubectl rollout restart`: a Deployment brings a new pod before it ends an old one, a StatefulSet ends one,
        the last first, before it brings it anew."""
        workload = next(item for item in self.workloads if item["metadata"]["name"] == name)
        pods = self.pods[name]
        surge = workload["kind"] == "Deployment" and workload["spec"].get("strategy", {}).get("type") != "Recreate"
        for index in reversed(range(len(pods))):
            old = pods[index]
            if surge:
                pods.append(self._make_pod(workload, index))
                await pods[-1].start()
                await self._ready(pods[-1], workload)
                await self._end(old)
                pods.remove(old)
            else:
                await self._end(old)
                pods[index] = self._make_pod(workload, index)
                await pods[index].start()
                await self._ready(pods[index], workload)

    async def _ready(self, pod: Pod, workload: Json) -> None:
        await until(lambda: pod.ready, f"{pod.name} is ready:\n{pod.log()}", START_PATIENCE)
        await asyncio.sleep(workload["spec"].get("minReadySeconds", 0))

    async def _end(self, pod: Pod) -> None:
        self.exit_codes += await pod.terminate()
        if pod.killed:
            self.killed.append(pod.name)

    def _make_pod(self, workload: Json, index: int) -> Pod:
        meta, spec = workload["metadata"], workload["spec"]
        generation = next(self._generations)
        stable = workload["kind"] == "StatefulSet"
        name = f"{meta['name']}-{index}" if stable else f"{meta['name']}-{generation}"
        template: Json = dict(spec["template"])
        claims = {}
        for claim in spec.get("volumeClaimTemplates", []):
            kind = claim["metadata"]["name"]
            full_name = f"{kind}-{name}"
            claims[full_name] = self._claim(kind, full_name)
            volumes = [*template["spec"].get("volumes", [])]
            volumes.append({"name": kind, "persistentVolumeClaim": {"claimName": full_name}})
            template["spec"] = {**template["spec"], "volumes": volumes}
        links = template["spec"].get("enableServiceLinks", True)
        around = Surroundings(
            self._manifest,
            self._folder / str(generation),
            self._commands,
            self.hosts,
            claims,
            {
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
                **{variable: os.environ[variable] for variable in VARIABLES if variable in os.environ},
                **(service_links(self._manifest, self.hosts) if links else {}),
            },
        )
        address = f"{self._network}.{next(self._numbers)}"
        return Pod(name, address, template, meta.get("namespace", "default"), around)

    def _claim(self, kind: str, name: str) -> Path:
        folder = self._folder / "claims" / name
        if not folder.exists():
            if kind in self._seeds:
                shutil.copytree(self._seeds[kind], folder, symlinks=True)
            else:
                folder.mkdir(parents=True)
        return folder

    async def _open_service(self, service: Json) -> None:
        name, selector = service["metadata"]["name"], service["spec"]["selector"]
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])

            def endpoints(target: str | int = target) -> list[Endpoint]:
                return [(pod.ip, pod.port(target)) for pod in self._behind(selector)]

            opened = ServicePort(self.hosts[name], port["port"], endpoints)
            self._ports[name, port["name"]] = await self._exits.enter_async_context(opened)

    def _behind(self, selector: Mapping[str, str]) -> list[Pod]:
        pods = [pod for pods in self.pods.values() for pod in pods]
        return [pod for pod in pods if pod.ready and pod.listed and selects(selector, pod.labels)]

    async def _close(self) -> None:
        await asyncio.gather(*(pod.kill() for pods in self.pods.values() for pod in pods))
        await self._exits.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)
