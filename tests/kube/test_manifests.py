"""What `lastcall kube manifest` prints, applied to a real API server, and the webhook in pods as it says."""

from __future__ import annotations

import base64
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from helpers.kube import images as kube_images
from helpers.kube.api import Api, Object, Refused, until
from helpers.kube.cluster import Cluster
from helpers.kube.webhook import Webhook
from kube import objects

NAMESPACE = "lastcall"
ACCOUNT = "lastcall-webhook"
# what everybody may who is somebody
BASIC = {("create", "selfsubjectaccessreviews"), ("create", "selfsubjectrulesreviews")}


@pytest.fixture(scope="module")
def documents() -> list[Object]:
    words = [
        sys.executable,
        "-m",
        "lastcall",
        "kube",
        "manifest",
        "--namespace",
        NAMESPACE,
        "--image",
        kube_images.LASTCALL,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [served(item) for item in yaml.safe_load_all(done.stdout)]


def served(item: Object) -> Object:
    """This server has the version before of one kind, with the same fields."""
    return {**item, "apiVersion": "policy/v1beta1"} if item["apiVersion"] == "policy/v1" else item


@pytest.fixture(scope="module")
def installed(cluster: Cluster, webhook: Webhook, documents: list[Object]) -> Iterator[Cluster]:
    """The webhook in pods, instead of the one that is a process of this machine."""
    path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    (configuration,) = (item for item in documents if item["kind"] == "MutatingWebhookConfiguration")
    cluster.api.ask("DELETE", f"{path}/{webhook.configuration()['metadata']['name']}")
    done = apply(cluster, documents)
    assert done.returncode == 0, done.stderr
    yield cluster
    cluster.api.ask("DELETE", f"{path}/{configuration['metadata']['name']}")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    cluster.api.create(webhook.configuration())


def apply(cluster: Cluster, items: list[Object], *options: str) -> subprocess.CompletedProcess[str]:
    return cluster.kubectl(
        "apply",
        "--validate=true",
        *options,
        "-f",
        "-",
        given=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
    )


def test_every_document_passes_the_strict_check_of_its_schema(
    installed: Cluster, documents: list[Object]
) -> None:
    done = apply(installed, documents, "--dry-run=server")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(documents)


def test_the_check_is_strict(installed: Cluster, documents: list[Object]) -> None:
    wrong = copy.deepcopy(documents)
    (deployment,) = (item for item in wrong if item["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    done = apply(installed, wrong, "--dry-run=server")
    assert "livenesProbe" in done.stderr


def account(cluster: Cluster) -> Api:
    """As the webhook's own service account, with its own token."""
    path = f"/api/v1/namespaces/{NAMESPACE}"
    until(
        lambda: bool(cluster.api.ask("GET", f"{path}/serviceaccounts/{ACCOUNT}").get("secrets")),
        lambda: "a token",
    )
    (reference,) = cluster.api.ask("GET", f"{path}/serviceaccounts/{ACCOUNT}")["secrets"]
    secret = cluster.api.ask("GET", f"{path}/secrets/{reference['name']}")
    return cluster.as_user(base64.b64decode(secret["data"]["token"]).decode())


def test_the_service_account_may_read_namespaces_and_the_server_says_no_to_all_else(
    installed: Cluster,
) -> None:
    user = account(installed)
    assert any(
        item["metadata"]["name"] == NAMESPACE for item in user.ask("GET", "/api/v1/namespaces")["items"]
    )
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": NAMESPACE},
    }
    rules = user.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)["status"][
        "resourceRules"
    ]
    allowed = {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
    assert allowed == {("get", "namespaces"), ("list", "namespaces"), ("watch", "namespaces")} | BASIC


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets", None),
        ("GET", "/api/v1/pods", None),
        (
            "POST",
            "/api/v1/namespaces",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "mine"}},
        ),
        ("DELETE", "/api/v1/namespaces/default", None),
        ("POST", "/api/v1/namespaces/default/pods", objects.make("Pod", "mine")),
        ("POST", "/apis/batch/v1/namespaces/default/jobs", objects.make("Job", "mine")),
        (
            "DELETE",
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/lastcall-webhook",
            None,
        ),
        ("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles", None),
        ("GET", "/api/v1/nodes", None),
    ],
)
def test_the_service_account_is_refused(installed: Cluster, method: str, path: str, body: Any) -> None:
    with pytest.raises(Refused, match="forbidden") as refused:
        account(installed).ask(method, path, body)
    assert refused.value.code == 403


def test_the_webhook_in_pods_patches_what_is_created(installed: Cluster) -> None:
    def available() -> bool:
        status = installed.api.get("Deployment", "lastcall-webhook", NAMESPACE)["status"]
        return int(status.get("availableReplicas", 0)) == 2

    until(available, lambda: installed.kubectl("-n", NAMESPACE, "describe", "pods").stdout[-6000:])
    made = installed.api.create(objects.make("Job", "in-pods", lastcall_enabled="true"), dry_run=True)
    assert "initContainers" in objects.pods(made)[0], installed.kubectl(
        "-n", NAMESPACE, "logs", "-l", "app.kubernetes.io/name=lastcall-webhook"
    ).stdout
