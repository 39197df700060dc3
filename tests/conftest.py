"""For all tests. One nursery serves those that start scripts; what a test leaves running is ended after it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from helpers import findings_table
from helpers.nursery import Nursery, opened


def pytest_configure() -> None:
    """A runner started in the background of a shell has SIGINT ignored, and so would every process that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    findings_table.hand_over(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    findings_table.take_over(node.config, node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    findings_table.write(terminalreporter, config)


@pytest.fixture(scope="session")
def warm() -> Iterator[Nursery]:
    with opened() as nursery:
        yield nursery


@pytest.fixture
def nursery(warm: Nursery) -> Iterator[Nursery]:
    yield warm
    warm.clear()
