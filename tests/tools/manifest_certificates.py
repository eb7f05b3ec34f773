"""What cert-manager would do: a Secret for each Certificate, signed by one authority."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import trustme

from tools.manifest import Json, Manifest


class Authority:
    """hosts: addresses that stand for names of Services here, and which certificates must carry too."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        self._ca = trustme.CA()
        self._hosts = hosts

    def secrets(self, manifest: Manifest) -> list[Json]:
        """Issues all certificates anew."""
        return [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": certificate["spec"]["secretName"], "namespace": "outrider"},
                "data": {name: base64.b64encode(content).decode() for name, content in self.files(certificate).items()},
            }
            for certificate in manifest.of_kind("Certificate")
            if not certificate["spec"].get("isCA")
        ]

    def files(self, certificate: Json) -> dict[str, bytes]:
        """A new certificate, and its key and authority, by the names that cert-manager gives them."""
        names = certificate["spec"]["dnsNames"]
        addresses = [self._hosts[name] for name in names if name in self._hosts]
        issued = self._ca.issue_cert(*names, *addresses)
        return {
            "tls.crt": issued.cert_chain_pems[0].bytes(),
            "tls.key": issued.private_key_pem.bytes(),
            "ca.crt": self._ca.cert_pem.bytes(),
        }
