"""The words of python's generator, read from memory: on each interpreter that lastcall was tested with."""

from __future__ import annotations

import logging
import random
import sys
import sysconfig
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lastcall.adapters.torch.randomness import mersenne


@pytest.fixture(autouse=True)
def _same_randomness_afterwards() -> Iterator[None]:
    state = random.getstate()
    mersenne._explain.cache_clear()
    yield
    random.setstate(state)
    mersenne._explain.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, version: tuple[int, int], free: int) -> None:
    """Another interpreter: as mersenne sees it alone."""
    there: Any = SimpleNamespace(implementation=SimpleNamespace(name=kind), version_info=(*version, 0))
    monkeypatch.setattr(mersenne, "sys", there)
    monkeypatch.setattr(mersenne, "sysconfig", SimpleNamespace(get_config_var=lambda name: free))


def test_this_interpreter_is_one_that_was_tested() -> None:
    assert sys.version_info[:2] in mersenne.TESTED
    assert sysconfig.get_config_var("Py_GIL_DISABLED") or mersenne.untested() == ""


@pytest.mark.skipif(bool(mersenne.untested()), reason="nothing is read from the memory of this interpreter")
def test_the_words_are_read_from_memory_and_equal_the_official_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    python = mersenne.Python()
    assert python.view is not None and not caplog.records
    for draws in range(700):
        random.seed(draws)
        for _ in range(draws % 5):
            random.gauss(0, 1)
        random.getrandbits(32 * draws + 1)
        assert python.read() == mersenne._official_python()


@pytest.mark.parametrize(
    ("kind", "version", "free", "named"),
    [
        ("cpython", (3, 15), 0, "cpython 3.15"),
        ("pypy", (3, 11), 0, "pypy 3.11"),
        ("cpython", (3, 14), 1, "cpython 3.14 without its lock"),
    ],
)
def test_an_unknown_interpreter_is_asked_officially_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    version: tuple[int, int],
    free: int,
    named: str,
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    pretend(monkeypatch, kind, version, free)
    monkeypatch.setattr(mersenne, "at", lambda address, nbytes: pytest.fail("its memory was read"))
    for _ in range(2):
        python = mersenne.Python()
        assert python.view is None
        assert python.read() == mersenne._official_python()
    (line,) = caplog.messages
    assert line.startswith("The random state of python is copied by its official getter")
    assert line.endswith(f"lastcall was not tested with {named}")


def test_words_that_are_not_where_they_were_are_asked_for_officially_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    monkeypatch.setattr(mersenne, "_HEAD", mersenne._HEAD + 8)
    for _ in range(2):
        assert mersenne.Python().view is None
    (line,) = caplog.messages
    assert line.endswith(mersenne._NOT_FOUND)
