from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

import pytest

from lastcall.core import logs


@contextlib.contextmanager
def untouched() -> Iterator[logging.Logger]:
    """As in a program that has not touched logging: pytest puts its own handlers on the root, after the fixtures."""
    root, ours = logging.getLogger(), logging.getLogger("lastcall")
    before = root.handlers[:], ours.level, ours.handlers[:]
    root.handlers[:] = []
    ours.handlers[:] = []
    ours.setLevel(logging.NOTSET)
    try:
        yield ours
    finally:
        root.handlers[:], ours.handlers[:] = before[0], before[2]
        ours.setLevel(before[1])


def test_info_lines_reach_stderr_where_nobody_configured_logging(capsys: pytest.CaptureFixture[str]) -> None:
    with untouched() as bare:
        with logs.Visible("INFO"):
            bare.info("saved %d", 7)
            bare.debug("not this")
        bare.info("nor this, the session is over")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].endswith("INFO lastcall: saved 7")


def test_everything_is_as_before_afterwards_also_when_the_session_failed() -> None:
    with untouched() as bare:
        with pytest.raises(RuntimeError), logs.Visible("DEBUG"):
            assert bare.level == logging.DEBUG
            raise RuntimeError
        assert bare.handlers == []
        assert bare.level == logging.NOTSET


def test_the_applications_own_handlers_are_the_only_ones_used() -> None:
    with untouched() as bare:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        logging.getLogger().addHandler(handler)
        with logs.Visible("INFO"):
            bare.info("once")
            assert bare.handlers == []
        assert stream.getvalue() == "once\n"


def test_a_level_that_the_application_has_set_stays() -> None:
    with untouched() as bare:
        bare.setLevel(logging.ERROR)
        with logs.Visible("INFO"):
            assert bare.level == logging.ERROR
        assert bare.level == logging.ERROR


def test_a_visible_can_be_entered_again(capsys: pytest.CaptureFixture[str]) -> None:
    with untouched() as bare:
        visible = logs.Visible("INFO")
        for _ in range(2):
            with visible:
                bare.info("here")
        assert len(capsys.readouterr().err.splitlines()) == 2
