"""What the words of a manifest mean on this machine: variables, mounted folders, names of Services, "every address"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.manifest import Json, Manifest

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True, slots=True)
class Names:
    """Of one pod. A cluster gives each pod a machine of its own; here it has an address of its own (127.x.y.z), so that
    ports need no change, and folders of its own.

    folders: by mount path; hosts: address by name of a Service.
    """

    ip: str
    folders: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)

    def here(self, text: str) -> str:
        """The same text, for this machine."""
        paths = "|".join(re.escape(path) for path in sorted(self.folders, key=len, reverse=True))
        if paths:
            text = re.sub(rf"(?<![\w./-])({paths})(?![\w-])", lambda match: self.folders[match[1]], text)
        names = "|".join(map(re.escape, sorted(self.hosts, key=len, reverse=True)))
        if names:
            domain = r"(?:\.[a-z0-9-]+(?:\.svc(?:\.cluster\.local)?)?)?"
            text = re.sub(rf"(?<![\w.-])({names}){domain}(?=:\d)", lambda match: self.hosts[match[1]], text)
        return re.sub(r"(?<![\d.])0\.0\.0\.0(?![\d.])", self.ip, text)


def expand(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes does it: an unknown name stays, `$$` is a dollar."""
    return _REFERENCE.sub(
        lambda match: "$" if match[0] == "$$" else environment.get(match[1], match[0]),
        text,
    )


def environment(container: Json, manifest: Manifest, fields: Mapping[str, str]) -> dict[str, str]:
    """Variables of a container. fields: by path, as a fieldRef names them. Raises KeyError for what is not there."""
    found: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            value = fields[source["fieldRef"]["fieldPath"]]
        elif reference := source.get("secretKeyRef"):
            value = manifest.files("Secret", reference["name"])[reference["key"]].decode()
        elif reference := source.get("configMapKeyRef"):
            value = manifest.files("ConfigMap", reference["name"])[reference["key"]].decode()
        elif reference := source.get("resourceFieldRef"):
            kind, resource = reference["resource"].split(".")
            value = container["resources"][kind][resource]
        elif source:
            raise KeyError(f"{entry['name']}: no valueFrom of {', '.join(source)} here")
        else:
            value = expand(entry["value"], found)
        found[entry["name"]] = value
    return found


def service_links(manifest: Manifest, hosts: Mapping[str, str]) -> dict[str, str]:
    """What Kubernetes puts into every pod that does not switch it off."""
    found: dict[str, str] = {}
    for service in manifest.of_kind("Service"):
        name = service["metadata"]["name"]
        if name not in hosts:
            continue
        prefix, port = name.upper().replace("-", "_"), service["spec"]["ports"][0]["port"]
        found |= {
            f"{prefix}_SERVICE_HOST": hosts[name],
            f"{prefix}_SERVICE_PORT": str(port),
            f"{prefix}_PORT": f"tcp://{hosts[name]}:{port}",
        }
    return found
