"""TLS where pods come and go: certificates are renewed under running servers and clients, names are those of roles."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from starlette.applications import Starlette

from outrider.v1 import control_service_pb2 as control_pb
from outrider.v1 import control_service_pb2_grpc as control_grpc
from scheduler.links import LinkError
from services.channel import ChannelConfig, ClientTls
from services.embedded_redis import find_redis_server
from services.http.server import HttpServer
from services.links import GrpcTargetLink, LinkConfig
from services.redis_client import REDIS_FAILURES, connect, with_tls
from services.server import Server, ServerConfig, TlsFiles
from tools.ports import free_port
from tools.served import served
from tools.waiting import PATIENCE, until

ROLE_NAME = "outrider-worker"


class Authority:
    """A certificate authority that writes into one folder, as cert-manager does into one Secret."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        self.issue(*names)

    def issue(self, *names: str) -> None:
        """By a new authority."""
        ca = trustme.CA()
        certificate = ca.issue_cert(*names)
        ca.cert_pem.write_to_path(str(self.folder / "ca.crt"))
        certificate.cert_chain_pems[0].write_to_path(str(self.files.certificate))
        certificate.private_key_pem.write_to_path(str(self.files.key))

    def client(self, server_name: str | None = None) -> ClientTls:
        return ClientTls(self.folder / "ca.crt", self.files.certificate, self.files.key, server_name)


@contextlib.asynccontextmanager
async def http_server(tls: TlsFiles) -> AsyncIterator[tuple[str, int]]:
    server = HttpServer(Starlette(), "127.0.0.1", 0, tls)
    host, port = (await server.start()).removeprefix("https://").split(":")
    try:
        yield host, int(port)
    finally:
        await server.close(0)


async def shown(host: str, port: int) -> str:
    return await asyncio.to_thread(ssl.get_server_certificate, (host, port))


async def test_http_takes_a_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "127.0.0.1")
    async with http_server(authority.files) as (host, port):
        before = await shown(host, port)
        authority.issue("127.0.0.1")

        async def renewed() -> bool:
            return await shown(host, port) != before

        await until(renewed, "the new certificate is shown")
        assert (await shown(host, port)).split() == authority.files.certificate.read_text().split()


async def test_http_keeps_its_certificate_while_the_new_files_do_not_fit_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path, "127.0.0.1")
    async with http_server(authority.files) as (host, port):
        before = await shown(host, port)
        trustme.CA().issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(str(authority.files.certificate))
        await until(lambda: "cannot be used" in caplog.text, "it says so")
        assert await shown(host, port) == before


async def test_health_is_also_served_where_probes_can_ask(tmp_path: Path) -> None:
    """Those of Kubernetes speak no TLS, and show no certificate."""
    authority = Authority(tmp_path, "127.0.0.1")
    health_address = f"127.0.0.1:{free_port()}"
    server = Server(ServerConfig(("127.0.0.1:0",), authority.files, health_address=health_address))
    (address,) = await server.start(())
    answered: dict[str, object] = {}
    try:
        for asked in (address, health_address):
            async with grpc.aio.insecure_channel(asked) as channel:
                request = health_pb2.HealthCheckRequest(service="liveness")
                with contextlib.suppress(grpc.RpcError):
                    answered[asked] = (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=3)).status
                with pytest.raises(grpc.RpcError):
                    await control_grpc.ControlServiceStub(channel).GetStatus(control_pb.GetStatusRequest(), timeout=3)
    finally:
        await server.drain(0)
    assert answered == {health_address: health_pb2.HealthCheckResponse.SERVING}
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(health_address.rpartition(":")[2]))) != 0


@pytest.mark.parametrize(("name", "trusted"), [(ROLE_NAME, True), (None, False), ("somebody-else", False)])
async def test_a_worker_is_known_by_the_name_of_its_role(tmp_path: Path, name: str | None, trusted: bool) -> None:
    """The address of a pod is in no certificate."""
    authority = Authority(tmp_path, ROLE_NAME)
    async with served(tls=authority.files) as site:
        link = linked_to(site.address, authority.client(name))
        try:
            with contextlib.nullcontext() if trusted else pytest.raises(LinkError):
                await link.identify()
        finally:
            await link.close()


async def test_a_link_that_failed_reads_its_certificates_again(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    authority = Authority(tmp_path / "server", ROLE_NAME)
    shutil.copytree(authority.folder, tmp_path / "client")
    client = tmp_path / "client"
    authority.issue(ROLE_NAME)  # the server has it first
    tls = ClientTls(client / "ca.crt", client / "tls.crt", client / "tls.key", ROLE_NAME)
    async with served(tls=authority.files) as site:
        link = linked_to(site.address, tls)
        try:
            with pytest.raises(LinkError):
                await link.identify()
            (client / "ca.crt").unlink()
            with pytest.raises(LinkError, match=r"cannot read .*ca\.crt"):
                await link.identify()
            shutil.copytree(authority.folder, client, dirs_exist_ok=True)
            await link.identify()
        finally:
            await link.close()


def linked_to(address: str, tls: ClientTls) -> GrpcTargetLink:
    return GrpcTargetLink(address, LinkConfig(connect_timeout=PATIENCE, channel=ChannelConfig(tls=tls)))


def test_only_redis_with_tls_gets_the_files_and_its_own_come_first() -> None:
    files = (Path("/ca"), Path("/cert"), Path("/key"))
    assert with_tls(None, *files) is None
    assert with_tls("redis://host:1/0", *files) == "redis://host:1/0"
    assert with_tls("rediss://u:p@host:1/0", Path("/ca"), None, None) == "rediss://u:p@host:1/0?ssl_ca_certs=%2Fca"
    given = with_tls("rediss://host:1/0?ssl_ca_certs=/mine", *files)
    assert given == "rediss://host:1/0?ssl_ca_certs=%2Fmine&ssl_certfile=%2Fcert&ssl_keyfile=%2Fkey"


async def test_redis_and_its_clients_take_renewed_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "127.0.0.1")
    port = free_port()
    files = authority.files
    url = with_tls(f"rediss://127.0.0.1:{port}/0", files.client_ca, files.certificate, files.key)
    assert url is not None
    options = {"tls-port": str(port), "port": "0", "bind": "127.0.0.1", "save": "", "dir": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        str(find_redis_server()),
        *(word for name, value in (options | tls_options(files)).items() for word in (f"--{name}", value)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with connect(url) as client:
            await until(lambda: answers_or_ended(client, process), "Redis answers over TLS")
            if process.returncode is not None:
                pytest.skip("this redis-server was built without TLS")
            authority.issue("127.0.0.1")
            for name, value in tls_options(files).items():
                await client.config_set(name, value)
            await client.connection_pool.disconnect()
            assert await answers(client)
        (tmp_path / "old").mkdir()
        stranger = Authority(tmp_path / "old", "127.0.0.1").files
        theirs = with_tls(f"rediss://127.0.0.1:{port}/0", files.client_ca, stranger.certificate, stranger.key)
        async with connect(theirs or "") as client:
            assert not await answers(client)
    finally:
        process.kill()
        await process.wait()


def tls_options(files: TlsFiles) -> dict[str, str]:
    return {
        "tls-cert-file": str(files.certificate),
        "tls-key-file": str(files.key),
        "tls-ca-cert-file": str(files.client_ca),
    }


async def answers_or_ended(client: Redis, process: asyncio.subprocess.Process) -> bool:
    return process.returncode is not None or await answers(client)


async def answers(client: Redis) -> bool:
    try:
        return bool(await client.ping())
    except REDIS_FAILURES:
        return False
