"""Servers: where they listen and where they refuse to, health, reflection, channelz, TLS that is renewed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler.links import LinkError
from services.channel import ChannelConfig, ClientTls, open_channel
from services.links import GrpcTargetLink, LinkConfig
from services.server import CannotListen, PortInUse, Server, ServerConfig, TlsFiles
from services.start_error import StartError
from tools.ports import free_port
from tools.served import served
from tools.waiting import PATIENCE

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(address: str, service: str) -> Any:
    async with open_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return (await call).status


async def test_port_0_picks_a_free_port_and_tells_it() -> None:
    server = Server(ServerConfig(("127.0.0.1:0",)))
    (address,) = await server.start(())
    try:
        port = int(address.removeprefix("127.0.0.1:"))
        assert port > 0
        with socket.create_connection(("127.0.0.1", port)):
            pass
    finally:
        await server.drain(0)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_second_server_cannot_take_the_same_address(kind: str, tmp_path: Path) -> None:
    """By default a second gRPC server shares a port without any error, and takes over a unix socket."""
    first = Server(ServerConfig(("127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/s",)))
    (address,) = await first.start(())
    try:
        second = Server(ServerConfig((address,)))
        with pytest.raises(PortInUse) as caught:
            await second.start(())
        assert caught.value.address == address
        assert isinstance(caught.value, StartError)
        assert str(caught.value) == f"{address} is in use by another process"
        assert await health(address, "liveness") == SERVING
    finally:
        await first.drain(0)


async def test_a_port_taken_by_anything_else_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PortInUse):
            await Server(ServerConfig((address,))).start(())


async def test_a_start_that_fails_gives_back_what_it_had_bound() -> None:
    free = free_port()
    with pytest.raises(CannotListen):
        await Server(ServerConfig((f"127.0.0.1:{free}", "nonsense"))).start(())
    again = Server(ServerConfig((f"127.0.0.1:{free}",)))
    await again.start(())
    await again.drain(0)


async def test_a_port_can_be_taken_again_after_the_server_ended() -> None:
    first = Server(ServerConfig(("127.0.0.1:0",)))
    (address,) = await first.start(())
    assert await health(address, "liveness") == SERVING
    await first.drain(0)
    second = Server(ServerConfig((address,)))
    assert await second.start(()) == (address,)
    await second.drain(0)


async def test_a_socket_file_left_by_a_killed_process_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    server = Server(ServerConfig((f"unix:{path}",)))
    await server.start(())
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert await health(f"unix:{path}", "liveness") == SERVING
    await server.drain(0)
    assert not path.exists()


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "127.0.0.1",
        ":5000",
        "127.0.0.1:99999",
        "no.such.host.invalid:0",
        "unix:/no/such/folder/s",
        f"unix:/tmp/{'x' * 103}",
    ],
)
async def test_an_address_that_cannot_be_listened_on_is_one_line(address: str) -> None:
    with pytest.raises(CannotListen) as caught:
        await Server(ServerConfig((address,))).start(())
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_file_in_the_way_of_a_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("x")
    with pytest.raises(CannotListen, match="in the way"):
        await Server(ServerConfig((f"unix:{path}",))).start(())
    assert path.read_text() == "x"


async def test_health_by_name() -> None:
    server = Server(ServerConfig(("127.0.0.1:0",)))
    (address,) = await server.start(())
    names = ("", "startup", "readiness", "liveness")
    try:
        assert [await health(address, name) for name in names] == [NOT_SERVING] * 3 + [SERVING]
        await server.set_ready(True)
        assert [await health(address, name) for name in names] == [SERVING] * 4
        await server.set_ready(False)
        assert [await health(address, name) for name in names] == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]
    finally:
        await server.drain(0)


async def test_reflection_and_channelz_are_served() -> None:
    async with served() as site, open_channel(site.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([request]))
        try:
            response = await call.read()
        finally:
            call.cancel()
        names = {service.name for service in response.list_services_response.service}
        assert {"outrider.v1.TargetService", "outrider.v1.ControlService", "grpc.health.v1.Health"} <= names
        servers = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
        assert len(servers.server) >= 1


class Authority:
    """A certificate authority and the files of one server."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.files = TlsFiles(folder / "server.pem", folder / "server.key")
        self.issue("127.0.0.1", "server", folder)

    def issue(self, name: str, stem: str, folder: Path) -> ClientTls:
        certificate = self.ca.issue_cert(name)
        certificate.cert_chain_pems[0].write_to_path(str(folder / f"{stem}.pem"))
        certificate.private_key_pem.write_to_path(str(folder / f"{stem}.key"))
        return ClientTls(self.ca_file, folder / f"{stem}.pem", folder / f"{stem}.key")


def link_with(address: str, tls: ClientTls) -> GrpcTargetLink:
    return GrpcTargetLink(address, LinkConfig(connect_timeout=PATIENCE, channel=ChannelConfig(tls=tls)))


async def test_with_a_client_authority_only_its_clients_may_speak(tmp_path: Path) -> None:
    ours, stranger_folder = Authority(tmp_path), tmp_path / "stranger"
    stranger_folder.mkdir()
    stranger = Authority(stranger_folder)
    tls = TlsFiles(ours.files.certificate, ours.files.key, client_ca=ours.ca_file)
    server = Server(ServerConfig(("127.0.0.1:0",), tls=tls))
    (address,) = await server.start(())
    theirs = stranger.issue("intruder", "intruder", stranger_folder)
    clients = {
        "ours": ours.issue("scheduler", "scheduler", tmp_path),
        "nameless": ClientTls(ours.ca_file),
        "stranger": ClientTls(ours.ca_file, theirs.certificate, theirs.key),
    }
    answered = {}
    try:
        for name, client in clients.items():
            async with open_channel(address, ChannelConfig(tls=client)) as channel:
                request = health_pb2.HealthCheckRequest(service="liveness")
                try:
                    answered[name] = (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE)).status
                except grpc.RpcError:
                    answered[name] = None
    finally:
        await server.drain(0)
    assert answered == {"ours": SERVING, "nameless": None, "stranger": None}


async def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = Server(ServerConfig(("127.0.0.1:0",), tls=authority.files))
    (address,) = await server.start(())
    host, port = address.split(":")
    try:
        before = await _certificate(host, int(port))
        assert before == _first_der(authority.files.certificate)
        authority.issue("127.0.0.1", "server", tmp_path)
        after = await _certificate(host, int(port))
        assert after == _first_der(authority.files.certificate) != before
    finally:
        await server.drain(0)


async def test_a_client_that_does_not_trust_the_server_says_so(tmp_path: Path) -> None:
    authority, other_folder = Authority(tmp_path), tmp_path / "other"
    other_folder.mkdir()
    server = Server(ServerConfig(("127.0.0.1:0",), tls=authority.files))
    (address,) = await server.start(())
    link = link_with(address, ClientTls(Authority(other_folder).ca_file))
    try:
        with pytest.raises(LinkError) as caught:
            await link.identify()
        assert "\n" not in str(caught.value)
    finally:
        await link.close()
        await server.drain(0)


async def test_a_missing_certificate_is_one_line(tmp_path: Path) -> None:
    tls = TlsFiles(tmp_path / "none.pem", tmp_path / "none.key")
    with pytest.raises(CannotListen, match=r"cannot read .*none"):
        await Server(ServerConfig(("127.0.0.1:0",), tls=tls)).start(())


def _first_der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


async def _certificate(host: str, port: int) -> bytes:
    """DER of what the server shows."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return bytes(shown)
