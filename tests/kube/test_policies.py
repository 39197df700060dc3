"""What a namespace allows its pods, and what the webhook adds to them."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.kube.api import Refused, until
from helpers.kube.cluster import Cluster
from kube import conftest, objects

pytestmark = pytest.mark.usefixtures("webhook")
SIZES = {"cpu": "2", "memory": "1Gi"}


def guaranteed(name: str, **annotations: str) -> dict[str, Any]:
    """A pod whose containers all have limits that are their requests."""
    item = objects.make("Pod", name, **annotations)
    for container in item["spec"]["containers"]:
        container["resources"] = {"requests": SIZES, "limits": SIZES}
    return item


@pytest.fixture(scope="module")
def narrow(cluster: Cluster) -> str:
    """A namespace with a LimitRange that leaves little choice. The API server hears of it a moment later."""
    cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "narrow"}})
    limit = {
        "type": "Container",
        "min": {"cpu": "1", "memory": "512Mi"},
        "maxLimitRequestRatio": {"cpu": "1"},
    }
    cluster.api.create(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "narrow"},
            "spec": {"limits": [limit]},
        },
        "narrow",
    )
    until(lambda: conftest.has_account(cluster, "narrow"), lambda: "a service account")
    until(lambda: refuses_small_ones(cluster), lambda: "the LimitRange to be known")
    return "narrow"


def refuses_small_ones(cluster: Cluster) -> bool:
    item = objects.make("Pod", "small")
    item["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    try:
        cluster.api.create(item, "narrow", dry_run=True)
    except Refused as error:
        return "minimum cpu usage" in str(error)
    return False


def test_a_guaranteed_pod_stays_one_and_a_limit_range_has_nothing_against_it(
    cluster: Cluster, narrow: str
) -> None:
    before = cluster.api.create(guaranteed("plain"), narrow, dry_run=True)
    after = cluster.api.create(guaranteed("asked", lastcall_enabled="true"), narrow, dry_run=True)
    assert [one["name"] for one in after["spec"]["initContainers"]] == ["lastcall-install"]
    assert before["status"]["qosClass"] == after["status"]["qosClass"] == "Guaranteed"
