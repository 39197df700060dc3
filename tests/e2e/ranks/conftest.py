"""For the trials of many ranks: a nursery whose children find torch.distributed imported, and a launcher for
each test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes.forkserver import Nursery, opened
from helpers.ranks import hosts as networks
from helpers.ranks import jobs as ranks_jobs
from helpers.ranks import trials as ranks_trials
from helpers.servers import s3 as s3_server
from helpers.servers.s3 import Server


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
def references(
    distributed: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ranks_trials.References]:
    made = ranks_jobs.Launcher(distributed, tmp_path_factory.mktemp("references"))
    yield ranks_trials.References(made)
    made.end()


# ---- machines that share no directory ----------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """The directories, one a machine."""
    return [tmp_path / f"machine-{number}" / "run" for number in range(2)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with s3_server.served(tmp_path / "buckets") as found:
        found.bucket("runs")
        yield found
        found.process.send_signal(signal.SIGCONT)  # a test may have stopped it
