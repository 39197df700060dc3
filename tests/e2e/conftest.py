"""One nursery for all tests of this folder; what a test leaves running is ended after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.nursery import Nursery, opened


@pytest.fixture(scope="session")
def warm() -> Iterator[Nursery]:
    with opened() as nursery:
        yield nursery


@pytest.fixture
def nursery(warm: Nursery) -> Iterator[Nursery]:
    yield warm
    warm.clear()
