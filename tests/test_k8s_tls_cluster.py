"""The rendered overlay local-tls as real processes: TLS between all parts, renewed under them."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from pathlib import Path

import pytest

from tools.manifest import OVERLAYS, Manifest
from tools.manifest_certificates import Authority
from tools.manifest_cluster import Cluster
from tools.manifest_table import Client, local_cluster
from tools.waiting import until

PATIENCE = 40.0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_everything_speaks_tls_and_goes_on_when_certificates_and_authority_change(tmp_path: Path) -> None:
    manifest = Manifest.render(OVERLAYS / "local-tls")
    cluster = local_cluster(tmp_path, "local-tls")
    first = Authority(cluster.hosts).secrets(manifest)
    cluster.bring(first)
    async with cluster:
        await answers(cluster, authority_of(first))
        places = [(pod.ip, port) for pods in cluster.pods.values() for pod in pods for port in tls_ports(pod.labels)]
        assert len(places) == 6
        before = [await shown(*place) for place in places]

        second = Authority(cluster.hosts).secrets(manifest)
        cluster.bring(second)

        async def renewed() -> bool:
            return not set(before) & {await shown(*place) for place in places}

        await until(renewed, "every server shows its new certificate", PATIENCE)
        # What connects now trusts the new authority alone: workers that come and go, and leases.
        await cluster.restart("outrider-draft")
        await cluster.restart("outrider-target")
        await answers(cluster, authority_of(second))
        assert cluster.killed == []


async def answers(cluster: Cluster, authority: bytes) -> None:
    client = Client.of(cluster, authority)
    await asyncio.gather(*(client.note("w1 w2 w1 w2 w1 w2", 40) for _ in range(4)))
    assert client.failures == []


def authority_of(secrets: list[dict[str, object]]) -> bytes:
    data = secrets[0]["data"]
    assert isinstance(data, dict)
    return base64.b64decode(data["ca.crt"])


def tls_ports(labels: dict[str, str]) -> list[int]:
    return {"scheduler": [50051, 8000], "target": [50061], "draft": [50062], "redis": [6379]}[
        labels["app.kubernetes.io/component"]
    ]


async def shown(ip: str, port: int) -> bytes:
    """The certificate of a server, trusted or not."""
    return await asyncio.to_thread(_shown, ip, port)


def _shown(ip: str, port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection((ip, port), timeout=5) as plain, context.wrap_socket(plain) as secured:
        return secured.getpeercert(binary_form=True) or b""
