"""For loops around an Accelerator: a nursery whose children find it imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.processes.forkserver import Nursery, opened


@pytest.fixture(scope="session")
def accelerated() -> Iterator[Nursery]:
    with opened(("accelerate", "accelerate.data_loader", "lastcall.adapters.accelerate.run")) as nursery:
        yield nursery
