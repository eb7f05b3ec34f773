"""What is in k8s/: every overlay renders, and is what Kubernetes and the operators that it needs understand.

Schemas of custom resources: tests/data/k8s_schemas.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.scheduler_process import refuse_exposed
from services.settings import SchedulerSettings, load
from services.settings.loading import KINDS, read_file
from tools.manifest import OVERLAYS, ROOT, Json, Manifest, containers
from tools.manifest_rules import PROMETHEUS_RULE, prometheus_rule

SCHEMAS = ROOT / "tests" / "data" / "k8s_schemas"
KUBERNETES = "1.37"
NAMES = sorted(folder.name for folder in OVERLAYS.iterdir())
LONGEST_STOP = 12.0
"""Seconds that a worker may take beyond its drain: the running forward, and the last results."""
POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}

COMPONENTS = sorted(folder for folder in (ROOT / "k8s" / "components").iterdir() if folder.name != "kuberay")

overlays = pytest.mark.parametrize("name", NAMES)


@functools.cache
def rendered(name: str) -> Manifest:
    return Manifest.render(OVERLAYS / name)


def workloads(manifest: Manifest) -> list[Json]:
    return manifest.of_kind("Deployment", "StatefulSet")


def pod_specs(manifest: Manifest) -> list[tuple[str, Json]]:
    return [(item["metadata"]["name"], item["spec"]["template"]["spec"]) for item in workloads(manifest)]


def closed(schema: Any) -> Any:
    """As an API server prunes: a name that a schema does not know is an error."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(part) for key, part in schema.items() if key != "$ref"}
    open_ended = schema.get("additionalProperties") or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("properties") and not open_ended:
        found["additionalProperties"] = False
    return found


@functools.cache
def validator(kind: str) -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(closed(json.loads((SCHEMAS / f"{kind}.json").read_text())))


def problems(item: Json) -> list[str]:
    """Of one object. A kind that nobody knows is one."""
    kind, api = item["kind"], item["apiVersion"]
    if (SCHEMAS / f"{kind}.json").exists() and "." in api.split("/")[0]:
        return [f"{kind} {error.json_path}: {error.message}" for error in validator(kind).iter_errors(item)]
    try:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [f"{kind}: {error}"]
    return []


@overlays
def test_an_overlay_renders_and_every_object_is_valid(name: str) -> None:
    found = [problem for item in rendered(name).objects for problem in problems(item)]
    assert found == []


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Deployment", "spec": {"template": {"spec": {"terminationGracePeriod": 5}}}},
        {"kind": "ScaledObject", "spec": {"pollInterval": 5}},
        {"kind": "Certificate", "spec": {"dnsNames": "outrider"}},
        {"kind": "ServiceMonitor", "spec": {"endpoints": [{"ports": "http"}]}},
        {"kind": "PrometheusRule", "spec": {"groups": [{"name": "g", "rules": [{"exp": "1"}]}]}},
        {"kind": "RayCloster", "apiVersion": "ray.io/v1"},
    ],
    ids=lambda change: str(change["kind"]),
)
def test_a_wrong_name_or_kind_is_found(change: Json) -> None:
    """The checks above can fail."""
    item = next((item for item in rendered("prod").objects if item["kind"] == change["kind"]), {"apiVersion": "v1"})
    assert problems(merged(item, change))


def merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merged(old.get(key), value) for key, value in new.items()}
    return new


@overlays
def test_every_object_lies_in_the_namespace_and_refers_to_what_is_there(name: str) -> None:
    """Secrets of real deployments are brought by their owner: all of them are in the documentation."""
    manifest = rendered(name)
    documented = (ROOT / "docs" / "kubernetes.md").read_text()
    known = {(item["kind"], item["metadata"]["name"]) for item in manifest.objects}
    brought = {certificate["spec"]["secretName"] for certificate in manifest.of_kind("Certificate")}
    accounts = {item["metadata"]["name"] for item in manifest.of_kind("ServiceAccount")}
    classes = {item["metadata"]["name"] for item in manifest.of_kind("PriorityClass")}
    for workload, spec in pod_specs(manifest):
        assert spec["serviceAccountName"] in accounts
        assert spec["priorityClassName"] in classes
        for kind, reference, key in references(spec):
            if (kind, reference) in known:
                assert key is None or key in manifest.files(kind, reference), (workload, reference, key)
            elif kind == "Secret" and reference not in brought:
                assert reference in documented, (workload, reference)
                assert key is None or f"{key}" in documented, (workload, reference, key)
            else:
                assert kind == "Secret", (workload, kind, reference)
    for item in manifest.objects:
        if item["kind"] not in ("Namespace", "PriorityClass"):
            assert item["metadata"]["namespace"] == "outrider"


def references(spec: Json) -> Iterator[tuple[str, str, str | None]]:
    """ConfigMaps and Secrets that a pod needs, with the key where it needs one."""
    for volume in spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"], None
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"], None
    for container in containers(spec):
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {})
            for kind, field in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                if field in source:
                    yield kind, source[field]["name"], source[field]["key"]


@overlays
def test_variables_are_set_once_and_refer_to_earlier_ones(name: str) -> None:
    """Kubernetes leaves $(NAME) as it is when NAME comes later, and a merge may reorder them."""
    for workload, spec in pod_specs(rendered(name)):
        for container in containers(spec):
            earlier: set[str] = set()
            for entry in container.get("env", []):
                assert entry["name"] not in earlier, (workload, entry["name"])
                wanted = set(re.findall(r"\$\((\w+)\)", entry.get("value", "")))
                assert wanted <= earlier, (workload, entry)
                earlier.add(entry["name"])
            words = " ".join([*container.get("command", []), *container.get("args", [])])
            assert set(re.findall(r"\$\((\w+)\)", words)) <= earlier


@overlays
def test_every_role_accepts_its_variables(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of components that no machine of the tests can run, too: a name that nobody reads is refused."""
    manifest = rendered(name)
    for variable in [variable for variable in os.environ if variable.startswith("OUTRIDER_")]:
        monkeypatch.delenv(variable)
    for workload, spec in pod_specs(manifest):
        kind = next((kind for kind in KINDS if workload == f"outrider-{kind.section}"), None)
        if kind is None:
            continue
        config = next(v["configMap"]["name"] for v in spec["volumes"] if v["name"] == "config")
        (tmp_path / "outrider.yaml").write_bytes(manifest.files("ConfigMap", config)["outrider.yaml"])
        entries = spec["containers"][0]["env"]
        with monkeypatch.context() as patched:
            for entry in entries:
                patched.setenv(entry["name"], made_up(entry, manifest).replace("$(POD_IP)", "10.0.0.7"))
            loaded = load(kind, tmp_path / "outrider.yaml")
        used = {source.removeprefix("environment ") for source in loaded.sources.values()}
        ours = {entry["name"] for entry in entries if entry["name"].startswith("OUTRIDER_")}
        assert ours - used <= {"OUTRIDER_CONFIG", "OUTRIDER_HOME"}, workload
        if isinstance(loaded.settings, SchedulerSettings):
            refuse_exposed(loaded.settings)


def made_up(entry: Json, manifest: Manifest) -> str:
    """A value where a cluster would have one."""
    source = entry.get("valueFrom", {})
    if reference := source.get("configMapKeyRef"):
        return manifest.files("ConfigMap", reference["name"])[reference["key"]].decode()
    kinds = {"resourceFieldRef": "2", "fieldRef": "10.0.0.7", "secretKeyRef": "redis://10.0.0.9:6379/0"}
    return str(entry["value"]) if not source else next(kinds[kind] for kind in source)


@overlays
def test_every_pod_keeps_the_restricted_standard_and_the_platforms_habits(name: str) -> None:
    for workload, spec in pod_specs(rendered(name)):
        assert spec["securityContext"].items() >= POD_SECURITY.items(), workload
        assert spec["securityContext"]["runAsUser"] >= 10000
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all("hostPath" not in volume for volume in spec.get("volumes", []))
        for container in containers(spec):
            assert container["securityContext"].items() >= CONTAINER_SECURITY.items(), workload
            for amount in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][amount].keys(), workload
            assert re.search(r":[\w.-]*\d[\w.-]*$", container["image"]), workload


@overlays
def test_every_server_has_its_probes_at_ports_that_it_declares(name: str) -> None:
    for workload, spec in pod_specs(rendered(name)):
        server = spec["containers"][0]
        declared = {port["containerPort"] for port in server["ports"]} | {port["name"] for port in server["ports"]}
        for kind in ("startup", "readiness", "liveness"):
            probe = server[f"{kind}Probe"]
            asked = probe.get("grpc") or probe["tcpSocket"]
            assert asked["port"] in declared, workload
            if "grpc" in probe:
                assert asked["service"] == kind


@overlays
def test_the_grace_period_is_longer_than_the_longest_drain(name: str) -> None:
    manifest = rendered(name)
    for workload, spec in pod_specs(manifest):
        role = workload.removeprefix("outrider-")
        if role not in {kind.section for kind in KINDS}:
            continue
        config = next(v["configMap"]["name"] for v in spec["volumes"] if v.get("configMap", {}).get("name"))
        settings = yaml.safe_load(manifest.files("ConfigMap", config)["outrider.yaml"])
        pre_stop = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert spec["terminationGracePeriodSeconds"] > pre_stop + settings[role]["drain_timeout"] + LONGEST_STOP
        assert role != "scheduler" or pre_stop >= 5


@overlays
def test_selectors_find_their_pods_and_ports(name: str) -> None:
    manifest = rendered(name)
    labels = {item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"] for item in workloads(manifest)}
    ports = {
        key: {p["name"] for c in spec["containers"] for p in c.get("ports", [])} for key, spec in pod_specs(manifest)
    }
    for item in workloads(manifest):
        assert item["spec"]["selector"]["matchLabels"].items() <= item["spec"]["template"]["metadata"]["labels"].items()
        if item["kind"] == "StatefulSet":
            assert manifest.one("Service", item["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
    for service in manifest.of_kind("Service"):
        behind = [key for key, found in labels.items() if service["spec"]["selector"].items() <= found.items()]
        assert len(behind) == 1, service["metadata"]["name"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[behind[0]]
    for budget in manifest.of_kind("PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        assert any(selector.items() <= found.items() for found in labels.values())
    for scaled in manifest.of_kind("ScaledObject"):
        target = scaled["spec"]["scaleTargetRef"]
        assert "replicas" not in manifest.one(target["kind"], target["name"])["spec"]


@overlays
def test_nothing_is_let_in_or_out_but_by_a_policy(name: str) -> None:
    policies = rendered(name).of_kind("NetworkPolicy")
    denied = next(item for item in policies if item["metadata"]["name"] == "default-deny")
    assert denied["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.parametrize("folder", COMPONENTS, ids=lambda folder: folder.name)
def test_every_component_is_in_an_overlay(folder: Path) -> None:
    """But for kuberay, which takes the place of most of the base and has a test of its own (test_pool_kuberay)."""
    used = "".join(file.read_text() for file in OVERLAYS.rglob("kustomization.yaml"))
    assert f"components/{folder.name}\n" in used


def test_the_rules_of_prometheus_are_those_of_the_file_for_them() -> None:
    assert yaml.safe_load(PROMETHEUS_RULE.read_text()) == prometheus_rule(), (
        "PYTHONPATH=tests python -m tools.manifest_rules"
    )


def test_the_settings_file_is_one() -> None:
    sections = read_file(ROOT / "k8s" / "base" / "config" / "settings.yaml")
    fields = {kind.section: set(kind.model_fields) for kind in KINDS}
    assert all(set(section) <= fields[name] for name, section in sections.items())
