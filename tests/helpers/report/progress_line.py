"""`--progress-line`: how far the tests are, and which files run, in place of a dot for each test.

A terminal gets one line that changes; a log file a line every twenty seconds. The name of a test that fails
is printed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

_EVERY = (0.5, 20.0)  # seconds between two lines: on a terminal, elsewhere


class ProgressLine:
    def __init__(
        self, write: Callable[[str], object], *, terminal: bool, width: int, now: Callable[[], float]
    ) -> None:
        self._write, self._terminal, self._width, self._now = write, terminal, width, now
        self._begun = self._written = now()
        self._total = self._done = self._failed = 0
        self._running: dict[str, None] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = max(self._total, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._total = len(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
        """The counts at the end need the category; the letters go."""
        category, _, _ = yield
        return category, "", ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None
        self._show()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed += 1
            self._write(f"{self._clear()}FAILED {report.nodeid} ({report.when})\n")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._done += 1
        if self._done == self._total:
            self._written = float("-inf")
        self._show()

    def line(self) -> str:
        """`42%  1204 of 2866, 1 failed, 1:07  unit/core/ranks/test_peers.py, e2e/test_signals.py`"""
        minutes, seconds = divmod(int(self._now() - self._begun), 60)
        percent = 100 * self._done // max(1, self._total)
        files = dict.fromkeys(nodeid.partition("::")[0].removeprefix("tests/") for nodeid in self._running)
        return (
            f"{percent:3}%  {self._done} of {self._total}, {self._failed} failed, {minutes}:{seconds:02}  "
            f"{', '.join(files)}"
        )

    def _show(self) -> None:
        now = self._now()
        if now - self._written < _EVERY[0 if self._terminal else 1]:
            return
        self._written = now
        line = self.line()
        self._write(self._clear() + line[: self._width - 1] if self._terminal else f"{line}\n")

    def _clear(self) -> str:
        return f"\r{' ' * (self._width - 1)}\r" if self._terminal else ""
