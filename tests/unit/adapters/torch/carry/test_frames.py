"""The variables of a frame, read and written: on each interpreter that lastcall is tested with."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from lastcall.adapters.torch.carry import frames

PASSES = 200  # enough for an interpreter that specializes a loop to do so


@pytest.fixture(autouse=True)
def _tried_out_again() -> Iterator[None]:
    frames.writable.cache_clear()
    yield
    frames.writable.cache_clear()


class Held:
    pass


def test_this_interpreter_lets_variables_be_written() -> None:
    assert frames.writable()


def test_plain_variables_cells_and_those_of_a_loop_get_the_values_that_are_written() -> None:
    def write(frame: FrameType) -> None:
        frames.write(frame, {"total": 100, "shared": [7], "new": "x"})

    def loop(write_at: int) -> tuple[int, list[int], Any]:
        total, shared, new = 0, [0], None

        def inner() -> list[int]:
            return shared

        for number in range(PASSES):
            if number == write_at:
                write(sys._getframe())
            total += 1
        return total, inner(), new

    assert loop(-1) == (PASSES, [0], None)
    assert loop(PASSES // 2) == (100 + PASSES // 2, [7], "x")


def test_the_variables_of_a_generator_are_read_and_written_while_it_waits() -> None:
    def numbers() -> Iterator[int]:
        number = 0
        while number < PASSES:
            yield number
            number += 1

    live: Any = numbers()
    assert [next(live) for _ in range(3)] == [0, 1, 2]
    assert frames.variables(live.gi_frame)["number"] == 2
    frames.write(live.gi_frame, {"number": 150})
    assert next(live) == 151


def test_reading_variables_does_not_keep_what_they_held() -> None:
    def loop() -> weakref.ref[Held]:
        batch = Held()
        gone = weakref.ref(batch)
        assert frames.variables(sys._getframe())["batch"] is batch
        del batch
        return gone

    assert loop()() is None


def test_what_locals_has_given_the_script_keeps_its_values() -> None:
    def loop() -> dict[str, Any]:
        value = 5
        own = locals()
        frames.variables(sys._getframe())
        assert value == own["value"]
        return own

    assert loop()["value"] == 5


def test_the_variables_of_a_module_are_those_of_its_dict() -> None:
    space: dict[str, Any] = {"frames": frames, "sys": sys}
    exec(
        "value = 1\nfound = frames.variables(sys._getframe())\nframes.write(sys._getframe(), {'value': 2})",
        space,
    )
    assert space["found"]["value"] == 1 and space["value"] == 2


def test_an_interpreter_that_loses_what_is_written_is_known_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "write", lambda frame, values: None)
    assert not frames.writable()


def test_one_that_has_no_way_to_write_is_known_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(frame: FrameType, values: object) -> None:
        raise AttributeError("PyFrame_LocalsToFast")

    monkeypatch.setattr(frames, "write", none)
    assert not frames.writable()
