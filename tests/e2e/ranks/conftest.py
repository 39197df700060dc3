"""For the trials of many ranks: a nursery whose children find torch.distributed imported, and a launcher for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import hosts as networks
from helpers import ranks_jobs, ranks_trials
from helpers.nursery import Nursery, opened


@pytest.fixture(scope="session")
def distributed() -> Iterator[Nursery]:
    with opened(ranks_jobs.IMPORTS) as nursery:
        yield nursery


@pytest.fixture
def launcher(distributed: Nursery, tmp_path: Path) -> Iterator[ranks_jobs.Launcher]:
    made = ranks_jobs.Launcher(distributed, tmp_path)
    yield made
    made.end()
    distributed.clear()


@pytest.fixture
def hosts(launcher: ranks_jobs.Launcher) -> Iterator[networks.Hosts]:
    with networks.network(2) as made:
        yield made
        launcher.end()  # before the hosts go


@pytest.fixture(scope="session")
def references(distributed: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ranks_trials.References]:
    made = ranks_jobs.Launcher(distributed, tmp_path_factory.mktemp("references"))
    yield ranks_trials.References(made)
    made.end()
