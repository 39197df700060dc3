"""For all tests. One nursery serves those that start scripts; what a test leaves running is ended after it.

Hypothesis draws the same examples in every run, so that what failed fails again. LASTCALL_TEST_RANDOM=1 draws
others each time, to look for what was not found yet.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from helpers.kube.definitions import kinds as kube_kinds
from helpers.processes.forkserver import Nursery, opened
from helpers.report.durations import Durations
from helpers.report.progress_line import ProgressLine
from helpers.trainer import findings_table

settings.register_profile("lastcall", derandomize=not os.environ.get("LASTCALL_TEST_RANDOM"), database=None)
settings.load_profile("lastcall")

TESTS = Path(__file__).resolve().parent
QUICK = ("unit", "property", "conformance", "house")  # folders; elsewhere what is marked `smoke`
# tests of kinds of Kubernetes by their projects' definitions, which may be missing here
_BY_DEFINITIONS = ("tests/property/test_kube_d", "tests/integration/kube/test_d", "tests/kube/")

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lastcall")
    group.addoption("--progress-line", action="store_true", help="one line that says how far the tests are")
    group.addoption("--durations-file", type=Path, metavar="FILE", help="write what tests and folders took")


@pytest.hookimpl(trylast=True)  # the terminal's reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """A runner started in the background of a shell has SIGINT ignored, and so would every process that the
    tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of pytest-xdist: the process that has started it reports
        return
    if file := config.getoption("--durations-file"):
        config.pluginmanager.register(Durations(config.invocation_params.dir / file))
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("--progress-line") and reporter is not None:
        config.pluginmanager.register(
            ProgressLine(
                lambda text: reporter.write(text, flush=True),
                terminal=reporter.isatty,
                width=os.get_terminal_size().columns if reporter.isatty else 0,
                now=time.monotonic,
            )
        )


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in QUICK or item.get_closest_marker("smoke"):
            item.add_marker("quick")


def pytest_sessionfinish(session: pytest.Session) -> None:
    findings_table.hand_over(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    findings_table.take_over(node.config, node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    findings_table.write(terminalreporter, config)
    ran = {getattr(one, "nodeid", "") for some in terminalreporter.stats.values() for one in some}
    if (line := kube_kinds.missing()) and any(name.startswith(_BY_DEFINITIONS) for name in ran):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A test that leaves a signal ignored, or with a handler of its own, fails itself, and not those that run
    after it."""
    before = _handlers()
    yield
    changed = {signum.name: handler for signum, handler in _handlers().items() if handler != before[signum]}
    _install(before)
    assert not changed, f"the test left these signals changed: {changed}"


@pytest.fixture
def leaving() -> Iterator[None]:
    """For tests of a process that saved and is about to exit: it leaves signals ignored, and this process
    goes on."""
    before = _handlers()
    yield
    _install(before)


def _handlers() -> dict[signal.Signals, Any]:
    return {signum: signal.getsignal(signum) for signum in _WATCHED}


def _install(handlers: dict[signal.Signals, Any]) -> None:
    for signum, handler in handlers.items():
        if handler is not None and signal.getsignal(signum) != handler:
            signal.signal(signum, handler)


@pytest.fixture(scope="session")
def warm() -> Iterator[Nursery]:
    with opened() as nursery:
        yield nursery


@pytest.fixture
def nursery(warm: Nursery) -> Iterator[Nursery]:
    yield warm
    warm.clear()
