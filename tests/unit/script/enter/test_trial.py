"""A save is entered only where the interpreter was seen to let it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from lastcall.script.enter import jumps, trial


@pytest.fixture(autouse=True)
def _tried_out_again() -> Iterator[None]:
    trial.refusal.cache_clear()
    yield
    trial.refusal.cache_clear()


def test_this_interpreter_lets_a_save_be_entered() -> None:
    assert trial.refusal() == ""


def test_a_trace_function_of_somebody_else_is_put_back() -> None:
    def theirs(frame: FrameType, event: str, arg: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(theirs)
    try:
        assert trial.refusal() == ""
        assert sys.gettrace() is theirs
    finally:
        sys.settrace(before)


def test_one_that_stays_on_its_line_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jumps, "jump", lambda frame, line: line)
    monkeypatch.setattr(sys, "version", "3.15.0 (main)")
    assert trial.refusal() == "cpython 3.15.0 does not let lastcall enter a save"


def test_one_that_refuses_the_line_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(frame: FrameType, line: int | None) -> None:
        raise ValueError("f_lineno can only be read")

    before = sys.gettrace()
    monkeypatch.setattr(jumps, "jump", refused)
    assert "f_lineno can only be read" in trial.refusal()
    assert sys.gettrace() is before


def test_one_whose_returns_are_other_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "returns", lambda frame: False)
    assert trial.refusal() != ""
