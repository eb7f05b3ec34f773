"""The rendered overlay local-cpu as real processes: what it sets arrives, it answers, and it is replaced under load."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.settings import RoleSettings, load
from services.settings.loading import KINDS, SECTIONS, read_file
from tools.manifest_cluster import Cluster
from tools.manifest_pod import Container, Pod
from tools.manifest_table import Client, local_cluster
from tools.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROLES = ("scheduler", "target", "draft")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with local_cluster(tmp_path_factory.mktemp("k8s")) as running:
        yield running


def pods_of(cluster: Cluster) -> list[Pod]:
    return [pod for pods in cluster.pods.values() for pod in pods]


def outriders(cluster: Cluster) -> list[Container]:
    return [container for pod in pods_of(cluster) for container in pod.containers if role_of(container) in ROLES]


def role_of(container: Container) -> str:
    return container.command[-1]


async def test_it_answers_whoever_has_a_key(cluster: Cluster) -> None:
    client = Client.of(cluster)
    answer = await client.ask("w1 w2 w3", 12)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["text"].split()) == 12
    assert (await client.ask("w1 w2 w3", 12, key="another key")).status_code == 401


async def test_speculation_is_on_and_every_worker_was_found_by_its_lease(cluster: Cluster) -> None:
    client = Client.of(cluster)
    await asyncio.gather(*(client.note("w1 w2 w1 w2 w1 w2", 40) for _ in range(4)))
    assert client.failures == []
    log = "\n".join(pod.log() for pod in cluster.pods["outrider-scheduler"])
    for name in ("outrider-target-0", "outrider-target-1", cluster.pods["outrider-draft"][0].name):
        assert f"worker {name} is connected at " in log


async def test_every_probe_succeeds_and_nothing_was_started_again(cluster: Cluster) -> None:
    for pod in pods_of(cluster):
        assert pod.restarts == 0, pod.log()
        for container in pod.containers:
            assert container.probes
            for kind in container.probes:

                def succeeded(container: Container = container, kind: str = kind) -> bool:
                    return container.successes[kind] > 0

                await until(succeeded, f"a {kind} probe of {container.name} succeeds")


async def test_every_port_is_listened_at(cluster: Cluster) -> None:
    for pod in pods_of(cluster):
        for container in pod.containers:
            for name, port in container.ports.items():
                with socket.socket() as probe:
                    assert probe.connect_ex((pod.ip, port)) == 0, f"port {name} of {container.name}"


async def test_every_variable_and_every_key_of_the_settings_file_arrives(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the very environment of each process; what nobody reads would be missed here, or refused by the process."""
    used: set[str] = set()
    for container in outriders(cluster):
        kind = kind_of(role_of(container))
        with monkeypatch.context() as patched:
            for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
                patched.delenv(name)
            for name, value in container.variables.items():
                patched.setenv(name, value)
            loaded = load(kind)
            section = read_file(Path(container.variables["OUTRIDER_CONFIG"]))[kind.section]
        assert section.keys() <= kind.model_fields.keys()
        for field, source in loaded.sources.items():
            if field in section:
                assert source.startswith(("file ", "environment ")), field
            if source.startswith("environment "):
                used.add(source.removeprefix("environment "))
        ours = {name for name in container.variables if name.startswith("OUTRIDER_")}
        assert ours - used <= {"OUTRIDER_CONFIG", "OUTRIDER_HOME"}, kind.section


async def test_the_sections_of_the_settings_file_are_roles_that_run(cluster: Cluster) -> None:
    config = Path(outriders(cluster)[0].variables["OUTRIDER_CONFIG"])
    assert set(read_file(config)) == {role_of(container) for container in outriders(cluster)} <= set(SECTIONS)


async def test_nothing_is_written_but_to_mounted_folders(cluster: Cluster) -> None:
    """HOME and the like lie where nothing can be written, so a process that wanted to would have ended."""
    for container in outriders(cluster):
        assert container.variables["HOME"].startswith("/dev/null")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_everything_is_replaced_under_load_without_a_failed_request(cluster: Cluster) -> None:
    client = Client.of(cluster)
    alone = (await client.ask("w1 w2 w3", 60)).json()["choices"][0]["text"]
    done = asyncio.Event()

    short = Client.of(cluster)

    async def ask_on() -> None:
        while not done.is_set():
            await client.note("w1 w2 w3", 60)

    async def ask_often() -> None:
        """So that some connection always comes at a bad moment."""
        while not done.is_set():
            await short.note("w1 w2 w3", 1)

    before = {pod.name for pod in pods_of(cluster)} - {"outrider-target-0", "outrider-target-1"}
    users = [asyncio.create_task(work()) for work in (ask_on, ask_on, ask_on, ask_often)]
    for name in ("outrider-scheduler", "outrider-target", "outrider-draft", "outrider-redis"):
        asked = len(client.answers)
        await cluster.restart(name)
        assert len(client.answers) > asked, f"nothing was answered while {name} was replaced"
    done.set()
    await asyncio.gather(*users)
    assert client.failures == short.failures == []
    assert set(client.answers) == {alone}
    assert cluster.killed == []
    assert cluster.exit_codes == [0] * len(cluster.exit_codes)
    assert before.isdisjoint(pod.name for pod in pods_of(cluster))
    assert all(pod.restarts == 0 for pod in pods_of(cluster))


def kind_of(section: str) -> type[RoleSettings]:
    return next(kind for kind in KINDS if kind.section == section)
