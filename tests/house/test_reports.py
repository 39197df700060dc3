"""What `make test` prints and writes: tests/helpers/report."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.report.durations import Durations
from helpers.report.progress_line import ProgressLine
from lastcall import testing


class Progress:
    def __init__(self, *, terminal: bool, width: int = 60) -> None:
        self.clock = testing.FakeClock()
        self.text = ""
        self.line = ProgressLine(self._write, terminal=terminal, width=width, now=self.clock.now)
        self.line.pytest_xdist_node_collection_finished([f"tests/a.py::t{number}" for number in range(4)])

    def _write(self, text: str) -> None:
        self.text += text

    def run(self, test: str, *, fails: bool = False, seconds: float = 1.0) -> None:
        self.line.pytest_runtest_logstart(test)
        self.clock.advance(seconds)
        self.line.pytest_runtest_logreport(report(test, seconds, fails=fails))
        self.line.pytest_runtest_logfinish(test)


def report(test: str, seconds: float, *, fails: bool = False) -> pytest.TestReport:
    outcome = "failed" if fails else "passed"
    return pytest.TestReport(test, (test, 0, test), {}, outcome, None, "call", duration=seconds)  # type: ignore[arg-type]


def test_a_log_file_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    progress = Progress(terminal=False)
    progress.line.pytest_runtest_logstart("tests/e2e/b.py::other")
    for number in range(3):
        progress.run(f"tests/a.py::t{number}", seconds=15)
    assert progress.text == " 50%  2 of 4, 0 failed, 0:30  e2e/b.py\n"
    progress.line.pytest_runtest_logfinish("tests/e2e/b.py::other")
    assert progress.text.splitlines()[1:] == ["100%  4 of 4, 0 failed, 0:45  "]


def test_a_terminal_has_one_line_that_is_cut_to_its_width() -> None:
    progress = Progress(terminal=True, width=30)
    progress.run("tests/unit/core/test_of_many_words.py::t0")
    first, blank, second = progress.text.split("\r")[-3:]
    assert (first, blank, second) == ("", " " * 29, " 25%  1 of 4, 0 failed, 0:01 "[:29])


def test_a_failure_is_named_at_once() -> None:
    progress = Progress(terminal=False)
    progress.run("tests/a.py::t0[x]", fails=True)
    assert progress.text == "FAILED tests/a.py::t0[x] (call)\n"


def test_the_slowest_tests_files_and_folders_are_written(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "out" / "durations.txt")
    for number in range(60):
        durations.pytest_runtest_logreport(report(f"tests/unit/core/a/test_x.py::t{number}", 0.5))
    durations.pytest_runtest_logreport(report("tests/e2e/test_y.py::slow", 7.25))
    durations.pytest_runtest_logreport(report("tests/e2e/test_y.py::slow", 1.0))
    durations.pytest_sessionfinish()
    text = (tmp_path / "out" / "durations.txt").read_text()
    assert text.startswith("     38.2 s  61 tests, one after the other\n\nthe slowest folders\n")
    assert "     30.0 s  tests/unit/core\n      8.2 s  tests/e2e\n" in text
    assert "     30.0 s  tests/unit/core/a/test_x.py\n" in text
    tests = text.partition("the slowest tests\n")[2].splitlines()
    assert tests[0] == "      8.2 s  tests/e2e/test_y.py::slow" and len(tests) == 50
