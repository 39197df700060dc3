"""For trainings with Transformers: a nursery whose children find it imported, and a stage for plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.processes.forkserver import Nursery, opened
from helpers.trainer import findings_table
from helpers.trainer import jobs as trainer_jobs


@pytest.fixture(scope="session")
def trainers() -> Iterator[Nursery]:
    with opened(trainer_jobs.IMPORTS) as nursery:
        yield nursery


@pytest.fixture(scope="session")
def stage(trainers: Nursery, tmp_path_factory: pytest.TempPathFactory) -> trainer_jobs.Stage:
    return trainer_jobs.Stage(trainers, tmp_path_factory.mktemp("plays"))


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> dict[str, dict[str, str]]:
    """Finding -> column -> what came of it. Printed when everything is over."""
    return findings_table.of(pytestconfig)
