"""The component for KubeRay: it renders over the base, uses fields that exist, and names what the base brings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.settings import SchedulerSettings, TargetSettings, UpSettings
from tools.manifest import ROOT, Json, Manifest

KUBERNETES = "1.37"
CLUSTER_FIELDS = {
    "authOptions",
    "autoscalerOptions",
    "enableInTreeAutoscaling",
    "gcsFaultToleranceOptions",
    "headGroupSpec",
    "headServiceAnnotations",
    "managedBy",
    "rayVersion",
    "suspend",
    "workerGroupSpecs",
}
"""Of RayClusterSpec in KubeRay's ray-operator/apis/ray/v1/raycluster_types.go; authOptions since its release 1.5.1.
There is no package of schemas for this kind."""
GROUP_FIELDS = {
    "groupName",
    "idleTimeoutSeconds",
    "maxReplicas",
    "minReplicas",
    "numOfHosts",
    "rayStartParams",
    "replicas",
    "scaleStrategy",
    "template",
}
HEAD_FIELDS = {"enableIngress", "headService", "rayStartParams", "serviceType", "template"}
FAULT_FIELDS = {"externalStorageNamespace", "redisAddress", "redisPassword", "redisUsername"}
AUTOSCALER_FIELDS = {
    "env",
    "envFrom",
    "idleTimeoutSeconds",
    "image",
    "imagePullPolicy",
    "resources",
    "securityContext",
    "upscalingMode",
    "volumeMounts",
}
BROUGHT = {"outrider-ray-redis"}
"""Secrets that whoever applies it brings, as the component says; those of the base are in docs/kubernetes.md."""


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Base and component alone."""
    overlay = tmp_path_factory.mktemp("ray")
    parts = {"resources": "base", "components": "components/kuberay"}
    content: dict[str, Any] = {"kind": "Kustomization", "namespace": "outrider"}
    content |= {key: [os.path.relpath(ROOT / "k8s" / part, overlay)] for key, part in parts.items()}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return Manifest.render(overlay)


@pytest.fixture(scope="module")
def spec(rendered: Manifest) -> Json:
    found: Json = rendered.one("RayCluster", "outrider-ray")["spec"]
    return found


def templates(spec: Json) -> Iterator[Json]:
    yield spec["headGroupSpec"]["template"]
    for group in spec["workerGroupSpecs"]:
        yield group["template"]


def test_only_fields_that_kuberay_has_are_used(spec: Json) -> None:
    assert set(spec) <= CLUSTER_FIELDS
    assert set(spec["headGroupSpec"]) <= HEAD_FIELDS
    assert set(spec["gcsFaultToleranceOptions"]) <= FAULT_FIELDS
    assert set(spec["autoscalerOptions"]) <= AUTOSCALER_FIELDS
    for group in spec["workerGroupSpecs"]:
        assert set(group) <= GROUP_FIELDS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "map[string]string"


def test_its_pods_are_valid_and_restricted(spec: Json) -> None:
    for template in templates(spec):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}}
        kubernetes_validate.validate({**pod, "spec": template["spec"]}, KUBERNETES, strict=True)
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in template["spec"]["containers"]:
            context = container["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]})


def test_token_and_fault_tolerance_are_on_and_the_version_is_ours(spec: Json) -> None:
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == "outrider-ray-redis:6379"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={spec['rayVersion']}" in pins


def test_the_launcher_has_the_place_of_the_scheduler(rendered: Manifest, spec: Json) -> None:
    labels = rendered.one("Service", "outrider")["spec"]["selector"]
    launchers = [template for template in templates(spec) if labels.items() <= template["metadata"]["labels"].items()]
    assert len(launchers) == 1
    (container,) = launchers[0]["spec"]["containers"]
    assert container["args"][0].splitlines()[-1] == "exec outrider up --pool ray --ray-address auto"
    named = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in rendered.one("Service", "outrider")["spec"]["ports"]} <= named
    fields = {*UpSettings.model_fields, *SchedulerSettings.model_fields, *TargetSettings.model_fields}
    variables = [variable["name"].removeprefix("OUTRIDER_").lower() for variable in container["env"]]
    assert set(variables) - {"config"} <= fields
    assert [item["metadata"]["name"] for item in rendered.of_kind("Deployment", "StatefulSet")] == ["outrider-redis"]


def test_what_it_names_is_brought_by_the_base_or_named_as_to_be_brought(rendered: Manifest, spec: Json) -> None:
    maps = {item["metadata"]["name"] for item in rendered.of_kind("ConfigMap")}
    documented = (ROOT / "docs" / "kubernetes.md").read_text()
    for kind, name in references(spec):
        if kind == "configMap":
            assert name in maps
        else:
            assert name in BROUGHT or name in documented


def references(part: Any) -> Iterator[tuple[str, str]]:
    """(configMap or secret, name) of everything that is read from one."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key in ("configMapKeyRef", "configMap"):
                yield "configMap", value["name"]
            elif key == "secretKeyRef":
                yield "secret", value["name"]
            else:
                yield from references(value)
    elif isinstance(part, list):
        for one in part:
            yield from references(one)
