from __future__ import annotations

import base64
import re
from typing import Any

import pytest
import yaml

from lastcall.kube.inject.kinds import KINDS
from lastcall.kube.install import formats, kube_yaml, manifests
from lastcall.kube.install.manifests import Installation
from lastcall.kube.webhook import certificates

AUTHORITY = certificates.authority()
INSTALLATION = Installation("registry/lastcall:1", "guard", 3, AUTHORITY)


def kind(name: str, installation: Installation = INSTALLATION) -> dict[str, Any]:
    (found,) = (obj for obj in manifests.objects(installation) if obj["kind"] == name)
    return found


def test_the_service_account_may_read_namespaces_and_nothing_else() -> None:
    assert kind("ClusterRole")["rules"] == [
        {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get", "list", "watch"]}
    ]
    assert kind("ClusterRoleBinding")["subjects"] == [
        {"kind": "ServiceAccount", "name": "lastcall-webhook", "namespace": "guard"}
    ]


def test_the_container_has_no_rights_to_speak_of() -> None:
    pod = kind("Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"] == {
        "type": "RuntimeDefault"
    }
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert (
        security["readOnlyRootFilesystem"]
        and not security["allowPrivilegeEscalation"]
        and security["capabilities"] == {"drop": ["ALL"]}
    )
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_node_with_the_webhook_on_it_can_be_drained(replicas: int) -> None:
    spec = kind("PodDisruptionBudget", Installation("lastcall:1", "guard", replicas, AUTHORITY))["spec"]
    assert spec.get("maxUnavailable") == 1 and "minAvailable" not in spec


def test_the_configuration_covers_every_kind_and_never_stands_in_the_way() -> None:
    (webhook,) = kind("MutatingWebhookConfiguration")["webhooks"]
    covered = {
        (rule["apiGroups"][0], resource) for rule in webhook["rules"] for resource in rule["resources"]
    }
    assert covered == {(one.group, one.plural) for one in KINDS} | {("", "namespaces")}
    assert (webhook["failurePolicy"], webhook["sideEffects"], webhook["reinvocationPolicy"]) == (
        "Ignore",
        "None",
        "IfNeeded",
    )
    assert base64.b64decode(webhook["clientConfig"]["caBundle"]) == AUTHORITY.certificate
    assert webhook["namespaceSelector"]["matchExpressions"][0]["values"] == ["kube-system", "guard"]


def test_the_certificate_is_made_for_the_name_of_the_service() -> None:
    (container,) = kind("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["--name", "lastcall-webhook.guard.svc"]
    assert (
        kind("Service")["metadata"]["name"] + "." + kind("Service")["metadata"]["namespace"] + ".svc"
        == container["args"][-1]
    )


def test_with_cert_manager_no_key_is_in_the_manifests() -> None:
    managed = Installation("image", "guard")
    names = {obj["kind"] for obj in manifests.objects(managed)}
    assert {"Issuer", "Certificate"} < names and "Secret" not in names
    configuration = kind("MutatingWebhookConfiguration", managed)
    assert configuration["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": "guard/lastcall-webhook-tls"
    }
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]
    assert "--tls-cert" in kind("Deployment", managed)["spec"]["template"]["spec"]["containers"][0]["args"]


def test_the_yaml_is_the_objects() -> None:
    text = kube_yaml.text(manifests.objects(INSTALLATION))
    assert list(yaml.safe_load_all(text)) == manifests.objects(INSTALLATION)


def test_the_kustomize_base_is_the_same_objects() -> None:
    files = formats.kustomize(INSTALLATION)
    (base,) = yaml.safe_load_all(files["kustomization.yaml"])
    assert [next(yaml.safe_load_all(files[name])) for name in base["resources"]] == manifests.objects(
        INSTALLATION
    )


@pytest.mark.parametrize(
    "installation", [INSTALLATION, Installation("image", "guard", 1)], ids=["own", "cert-manager"]
)
def test_the_chart_renders_to_the_same_objects_but_the_namespace(installation: Installation) -> None:
    files = formats.helm(installation)
    values = next(yaml.safe_load_all(files["values.yaml"]))

    def rendered(match: re.Match[str]) -> str:
        name, *pipe = (part.strip() for part in match[1].split("|"))
        value: Any = {"Values": values, "Release": {"Namespace": "guard"}}
        for part in name.strip(".").split("."):
            value = value[part]
        return base64.b64encode(value.encode()).decode() if pipe == ["b64enc"] else str(value)

    texts = [
        re.sub(r"\{\{(.*?)\}\}", rendered, text)
        for name, text in files.items()
        if name.startswith("templates/")
    ]
    assert [next(yaml.safe_load_all(text)) for text in texts] == manifests.objects(installation)[1:]
    assert next(yaml.safe_load_all(files["Chart.yaml"]))["apiVersion"] == "v2"


def test_the_authority_is_found_again_in_what_was_written() -> None:
    assert formats.authority_in(kube_yaml.text(manifests.objects(INSTALLATION))) == AUTHORITY


@pytest.mark.parametrize(
    "text", ["", "kind: Secret", "kind: Secret\ndata: {ca.crt: '*', ca.key: eA==}", "a: [", "- 5"]
)
def test_what_holds_no_authority_is_told_apart(text: str) -> None:
    with pytest.raises(formats.WrongSecret):
        formats.authority_in(text)
