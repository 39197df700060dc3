"""These tests need Ray and minutes: they run when asked for by name (make e2e-ray), not with all others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.ray.cluster import Cluster

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "scripts"))  # for task.py, by which the tests know what comes out


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [
        (config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args
    ]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """For all tests that do not take the head away. Nodes come and go; runs that use none of them are on the
    head."""
    with Cluster(cpus=8) as running:
        yield running
