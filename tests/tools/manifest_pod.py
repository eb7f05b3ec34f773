"""A pod of a manifest as processes: its volumes as folders, its containers as commands, its probes asked, its end as
in a cluster: preStop, SIGTERM, the grace period, SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.child import LEASH
from tools.manifest import Json, Manifest, containers
from tools.manifest_names import Names, environment, expand
from tools.manifest_probe import read_probe

KNOWN_KEYS = {"name", "image", "imagePullPolicy", "command", "args", "env", "ports", "lifecycle", "volumeMounts"}
KNOWN_KEYS |= {"startupProbe", "readinessProbe", "livenessProbe", "resources", "securityContext"}
"""Of a container; another one would be silently without effect here."""

ENDPOINT_LAG = 2.0
"""Seconds until the nodes have heard that a pod ends, and send it no new connections."""

RESTART_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a pod finds here. commands: by first word of a command or name of an image, what to run instead.
    claims: folders of volumes that outlive it, by name of the claim."""

    manifest: Manifest
    folder: Path
    commands: Mapping[str, Sequence[str]]
    hosts: Mapping[str, str]
    claims: Mapping[str, Path] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


class Pod:
    """`start`, and in the end `terminate` or `kill`."""

    def __init__(self, name: str, ip: str, template: Json, namespace: str, around: Surroundings) -> None:
        """Lays its volumes. Raises ValueError for what the runner does not know."""
        self.name, self.ip = name, ip
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.listed = True
        """Whether nodes still count it among the endpoints of its Services."""
        self.killed = False
        self.spec: Json = template["spec"]
        self.folder = around.folder / name
        volumes = {volume["name"]: self._volume(volume, around) for volume in self.spec.get("volumes", [])}
        self._folders = _mounted(self.spec, volumes)
        self._names = Names(ip, self._folders, around.hosts)
        _translate(self.folder / "v", self._names)
        fields = {"metadata.name": name, "metadata.namespace": namespace, "status.podIP": ip}
        self.init = [self._container(spec, around, fields) for spec in self.spec.get("initContainers", [])]
        self.containers = [self._container(spec, around, fields) for spec in self.spec["containers"]]

    @property
    def ready(self) -> bool:
        return all(container.ready for container in self.containers)

    @property
    def restarts(self) -> int:
        return sum(container.restarts for container in self.containers)

    def port(self, name_or_number: str | int) -> int:
        if isinstance(name_or_number, int):
            return name_or_number
        return next(c.ports[name_or_number] for c in self.containers if name_or_number in c.ports)

    async def start(self) -> None:
        """Runs the init containers to their end, then starts the others. Raises RuntimeError."""
        for container in self.init:
            if (code := await container.run_once(container.command)) != 0:
                raise RuntimeError(f"init container {container.name} of {self.name} ended with {code}:\n{self.log()}")
        for container in self.containers:
            container.start()

    async def terminate(self) -> list[int]:
        """As when a pod is deleted. Returns the exit codes."""
        unlist = asyncio.create_task(self._unlist())
        grace = self.spec.get("terminationGracePeriodSeconds", 30)
        codes = await asyncio.gather(*(container.terminate(grace) for container in self.containers))
        self.killed = any(container.killed for container in self.containers)
        await unlist
        return codes

    async def kill(self) -> None:
        await asyncio.gather(*(container.kill() for container in (*self.init, *self.containers)))

    def refresh_secrets(self, manifest: Manifest, names: Collection[str]) -> None:
        """Writes the files of these Secrets anew where they are mounted."""
        for volume in self.spec.get("volumes", []):
            if (secret := volume.get("secret")) and secret["secretName"] in names:
                for file, content in manifest.files("Secret", secret["secretName"]).items():
                    (self.folder / "v" / volume["name"] / file).write_bytes(content)

    def log(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in self.folder.glob("*.log"))

    async def _unlist(self) -> None:
        await asyncio.sleep(ENDPOINT_LAG)
        self.listed = False

    def _container(self, spec: Json, around: Surroundings, fields: Mapping[str, str]) -> Container:
        if unknown := spec.keys() - KNOWN_KEYS:
            raise ValueError(f"container {spec['name']}: the runner knows no {', '.join(sorted(unknown))}")
        found = environment(spec, around.manifest, fields)
        words = [expand(word, found) for word in (*spec.get("command", []), *spec.get("args", []))]
        image = spec["image"].rsplit(":", 1)[0].rsplit("/", 1)[-1]
        prefix = around.commands[words.pop(0) if "command" in spec else image]
        variables = {
            **around.variables,
            # Of a read-only root file system: nothing can be written there.
            "HOME": "/dev/null/home",
            "TMPDIR": self._folders.get("/tmp", "/dev/null/tmp"),
            **{name: self._names.here(value) for name, value in found.items()},
        }
        command = [*prefix, *map(self._names.here, words)]
        return Container(spec, self.ip, command, variables, self.folder, around.commands, self._names)

    def _volume(self, volume: Json, around: Surroundings) -> Path:
        """The folder that stands for a volume, filled."""
        name = str(volume["name"])
        if claim := volume.get("persistentVolumeClaim"):
            return around.claims[str(claim["claimName"])]
        folder = self.folder / "v" / name
        folder.mkdir(parents=True)
        if "emptyDir" in volume:
            return folder
        if "configMap" in volume:
            files = around.manifest.files("ConfigMap", volume["configMap"]["name"])
        elif "secret" in volume:
            files = around.manifest.files("Secret", volume["secret"]["secretName"])
        else:
            raise ValueError(f"volume {name}: the runner knows no such kind: {volume}")
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return folder


def _mounted(spec: Json, volumes: Mapping[str, Path]) -> dict[str, str]:
    """Folders by mount path. Raises ValueError for a mount that the runner does not know."""
    folders: dict[str, str] = {}
    for container in containers(spec):
        for mount in container.get("volumeMounts", []):
            folder = str(volumes[mount["name"]])
            if mount.keys() - {"name", "mountPath", "readOnly"} or folders.get(mount["mountPath"], folder) != folder:
                raise ValueError(f"container {container['name']}: the runner knows no such mount: {mount}")
            folders[mount["mountPath"]] = folder
    return folders


def _translate(folder: Path, names: Names) -> None:
    """Mounted settings name paths and addresses, too."""
    for file in folder.rglob("*"):
        if file.suffix in (".yaml", ".conf", ".sh"):
            file.write_text(names.here(file.read_text()))


class Container:
    """One container: a process that is started again when it ends, until it is told to end."""

    def __init__(
        self,
        spec: Json,
        ip: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        commands: Mapping[str, Sequence[str]],
        names: Names,
    ) -> None:
        self.name: str = spec["name"]
        self.command = list(command)
        self.variables = dict(variables)
        self.ports: dict[str, int] = {port["name"]: port["containerPort"] for port in spec.get("ports", [])}
        self.ready = False
        self.killed = False
        self.restarts = 0
        self.successes: Counter[str] = Counter()
        """Of its probes, by kind."""
        self._names, self._commands = names, commands
        self._log = folder / f"{self.name}.log"
        self._pre_stop: Json = spec.get("lifecycle", {}).get("preStop", {})
        kinds = ("startup", "readiness", "liveness")
        self.probes = {
            kind: read_probe(spec[f"{kind}Probe"], ip, self.ports, self.run_once)
            for kind in kinds
            if f"{kind}Probe" in spec
        }
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_running(), name=f"container {self.name}")

    async def run_once(self, words: Sequence[str]) -> int:
        """A command in this container. Returns its exit code."""
        process = await self._spawn(words if words is self.command else self._inside(words))
        try:
            return await process.wait()
        finally:
            await _end(process)

    async def terminate(self, grace: float) -> int:
        """preStop counts towards the grace period. Returns the exit code."""
        deadline = asyncio.get_running_loop().time() + grace
        self._stopping = True
        if seconds := self._pre_stop.get("sleep", {}).get("seconds"):
            await asyncio.sleep(seconds)
        elif words := self._pre_stop.get("exec", {}).get("command"):
            await self.run_once(words)
        if self._process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout_at(deadline):
                return await self._process.wait()
        except TimeoutError:
            self.killed = True
            return -9
        finally:
            await self.kill()

    async def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await _end(self._process)
        self.ready = False

    async def _keep_running(self) -> None:
        while True:
            self._process = await self._spawn(self.command)
            probing = asyncio.create_task(self._probe())
            try:
                ended = asyncio.create_task(self._process.wait())
                await asyncio.wait([ended, probing], return_when=asyncio.FIRST_COMPLETED)
                if self._stopping:
                    await ended
                    return
                await _end(self._process)
            finally:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)
            self.ready = False
            self.restarts += 1
            await asyncio.sleep(RESTART_SECONDS)

    async def _probe(self) -> None:
        """Returns when the process must be started again."""
        if "startup" in self.probes and not await self._ask("startup", until=True):
            return
        self.ready = "readiness" not in self.probes
        following = asyncio.create_task(self._follow_readiness())
        try:
            if "liveness" not in self.probes:
                await following
            await self._ask("liveness", until=False)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _ask(self, kind: str, until: bool) -> bool:
        """`until` it succeeds (True), or until it fails too often (False)."""
        probe, failures = self.probes[kind], 0
        await asyncio.sleep(probe.delay)
        while failures < probe.failure_threshold:
            if await probe.holds():
                self.successes[kind] += 1
                failures = 0
                if until:
                    return True
            else:
                failures += 1
            await asyncio.sleep(probe.period)
        return False

    async def _follow_readiness(self) -> None:
        probe, failures = self.probes.get("readiness"), 0
        if probe is None:
            await asyncio.Event().wait()
            return
        await asyncio.sleep(probe.delay)
        while True:
            if await probe.holds():
                self.successes["readiness"] += 1
                failures, self.ready = 0, True
            else:
                failures += 1
                self.ready = self.ready and failures < probe.failure_threshold
            await asyncio.sleep(probe.period if self.ready else min(probe.period, 1.0))

    def _inside(self, words: Sequence[str]) -> list[str]:
        return [*self._commands.get(words[0], [words[0]]), *map(self._names.here, words[1:])]

    async def _spawn(self, words: Sequence[str]) -> asyncio.subprocess.Process:
        """On a leash: it dies with this process, however that ends."""
        program = shutil.which(words[0]) or words[0]
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), program, *words[1:]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], **self.variables},
                start_new_session=True,
            )


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    await process.wait()
