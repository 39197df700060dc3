"""These tests need root on a Debian 12, a built Kubernetes and minutes:

they run when asked for by name (make e2e-kube), not with all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.kube import build as kube_build
from helpers.kube.api import until
from helpers.kube.cluster import Cluster
from helpers.kube.definitions import kinds as kube_kinds
from helpers.kube.definitions import old_server
from helpers.kube.webhook import Webhook

HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [
        (config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args
    ]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Containers, imports of torch in them, and graces are waited for."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Without a webhook, and without any kind but Kubernetes' own."""
    with Cluster(kube_build.ensure()) as running:
        yield running


@pytest.fixture(scope="session")
def kinds(cluster: Cluster) -> Cluster:
    """The same, with the kinds of KubeRay, Kubeflow, JobSet and Kueue."""
    found = kube_kinds.definitions()
    for definition in found.values():
        cluster.api.create(old_server.fitted(definition))
    for name in found:
        until(lambda name=name: established(cluster, name), lambda name=name: f"{name} to be served")  # type: ignore[misc]
    return cluster


@pytest.fixture(scope="session")
def webhook(kinds: Cluster) -> Iterator[Webhook]:
    """The same, with the webhook. It is there for all tests that come after the first that asks for it."""
    with Webhook(kinds) as running:
        yield running


def established(cluster: Cluster, name: str) -> bool:
    definition = cluster.api.get("CustomResourceDefinition", name)
    conditions = {it["type"]: it["status"] for it in definition.get("status", {}).get("conditions", [])}
    assert conditions.get("NonStructuralSchema") != "True", definition["status"]
    return conditions.get("Established") == "True"


@pytest.fixture(scope="session")
def unasked(cluster: Cluster) -> str:
    """A namespace that has opted out. Its service account is there when its token is: pods are refused before
    that."""
    metadata = {"name": "unasked", "labels": {"lastcall.dev/webhook": "disabled"}}
    cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    until(lambda: has_account(cluster, "unasked"), lambda: "a service account")
    return "unasked"


def has_account(cluster: Cluster, namespace: str) -> bool:
    found = cluster.api.ask("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts")["items"]
    return any(account.get("secrets") for account in found)
