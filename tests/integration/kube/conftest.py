from __future__ import annotations

from pathlib import Path

import pytest

from helpers.kube.fake_kubectl import Cluster
from lastcall.kube.jobs.kubectl import Kubectl


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


@pytest.fixture
def kubectl(cluster: Cluster) -> Kubectl:
    return Kubectl(str(cluster.kubectl), namespace="team")
