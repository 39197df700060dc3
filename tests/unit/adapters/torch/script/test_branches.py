"""The script's own save is found in its source, and entered as though its condition were true."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lastcall.adapters.torch.script import branches
from lastcall.adapters.torch.script.entering import Entering


class Saver:
    """Stands for an Accelerator."""

    is_main_process = True

    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_state(self, folder: str) -> None:
        self.saved.append(folder)


class Stopped(Exception):
    pass


class Loop:
    """Runs a script that calls step() in its loop, and enters its save after the step `at`."""

    def __init__(self, folder: Path, source: str, at: int = 3, *, wait: bool = True) -> None:
        self.accelerator = Saver()
        self.steps = 0
        self.found: list[branches.Branch] = []
        self.because = ""
        self._at, self._wait = at, wait
        path = folder / "script.py"
        path.write_text(textwrap.dedent(source))
        self.space: dict[str, Any] = {"accelerator": self.accelerator, "step": self._step, "__name__": "script"}
        self._code = compile(path.read_text(), str(path), "exec")

    def run(self) -> list[str]:
        before = sys.gettrace()
        try:
            exec(self._code, self.space)
        except Stopped:
            pass
        finally:
            sys.settrace(before)
        return self.accelerator.saved

    def _step(self) -> None:
        self.steps += 1
        frame: FrameType | None = sys._getframe(1)
        if self.steps == 1:
            self.found, self.because = branches.find(frame)
        if self.steps == self._at and self.found:
            entering = Entering(self.found, self._after, wait=self._wait)
            sys.settrace(None)
            assert entering.begin(frame)

    def _after(self) -> None:
        raise Stopped


FLAT = """
    for number in range(1, 10):
        step()
        if number % 100 == 0:
            folder = f"step_{number}"
            accelerator.save_state(folder)
        last = number
"""
FUNCTION = """
    def advance():
        step()

    def train(total):
        number = 0
        while number < total:
            advance()
            number += 1
            if True:
                if (number % 100 == 0
                        and number > 0):
                    if accelerator.is_main_process:
                        accelerator.save_state(f"step_{number}")
    train(10)
"""
BEFORE = """
    for number in range(1, 10):
        if number > 1 and number % 100 == 1:
            with open(__file__ if False else "/dev/null"):
                accelerator.save_state(f"step_{number}")
        step()
"""
TWO = """
    for number in range(1, 10):
        step()
        if number < 0:
            if number % 7 == 0:
                accelerator.save_state("never")
        elif number % 100 == 0:
            accelerator.save_state(f"step_{number}")
"""


@pytest.mark.parametrize(
    ("source", "saved"),
    [(FLAT, "step_3"), (FUNCTION, "step_3"), (BEFORE, "step_4"), (TWO, "step_3")],
    ids=["flat", "function", "before", "two"],
)
def test_the_save_is_run_with_the_scripts_own_variables(tmp_path: Path, source: str, saved: str) -> None:
    loop = Loop(tmp_path, source)
    assert loop.run() == [saved], loop.because
    assert loop.space.get("last", 2) == 2  # what follows the branch was not run any more


def test_a_rank_that_does_not_save_leaves_without(tmp_path: Path) -> None:
    source = FLAT.replace("if number % 100", "if accelerator.is_main_process and number % 100")
    loop = Loop(tmp_path, source, wait=False)
    loop.accelerator.is_main_process = False
    assert loop.run() == [] and loop.steps == 3


def test_without_a_notice_nothing_is_entered(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FLAT, at=1000)
    assert loop.run() == [] and loop.steps == 9


@pytest.mark.parametrize(
    ("source", "because"),
    [
        ("for number in range(3):\n    step()\n", "no frame"),
        ("for number in range(3):\n    step()\naccelerator.save_state('end')\n", "no frame"),
        ("for number in range(3):\n    step()\n    if number % 9 == 8: accelerator.save_state('x')\n", "on one line"),
        ("for number in range(3):\n    step()\n    if number == 8:\n        accelerator.save_state('x')\n", "no frame"),
    ],
    ids=["none", "after", "one line", "no period"],
)
def test_what_is_not_recognised_is_said(tmp_path: Path, source: str, because: str) -> None:
    loop = Loop(tmp_path, source)
    loop.run()
    assert loop.found == [] and because in loop.because
