"""For trainings with Transformers: a nursery whose children find it imported, a stage for plays, and a table at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers import trainer_jobs
from helpers.nursery import Nursery, opened

_TABLE = pytest.StashKey[dict[str, dict[str, str]]]()


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
    return pytestconfig.stash.setdefault(_TABLE, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_TABLE, {})
    if not rows:
        return
    terminalreporter.section("findings about Transformers' own callback: theirs and ours")
    wide = max(len(name) for name in rows)
    for name, cells in rows.items():
        terminalreporter.write_line(f"{name:{wide}}  Transformers: {cells.get('hf', 'not run here (make test-all)')}")
        terminalreporter.write_line(f"{'':{wide}}  lastcall:     {cells.get('lastcall', 'not run here (make test-all)')}")
