"""A script's own save, entered without a framework: on each interpreter that lastcall is tested with."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lastcall import script as scripts
from lastcall.script.enter import jumps, trial

STEPS = 12
AT = 5

SHAPES = {
    "a block": """
        def main():
            total = 0
            for step in range(begin(), 12):
                total += step
                stepped(step)
                if step % every == 999:
                    save(step, total)
                done(step)
        """,
    "one line": """
        def main():
            total = 0
            for step in range(begin(), 12):
                total += step
                stepped(step)
                if step % every == 999: save(step, total)
                done(step)
        """,
    "a flag of its own": """
        def main():
            total, last = 0, -1
            for step in range(begin(), 12):
                total += step
                stepped(step)
                due = step - last == 999
                if due:
                    last = step
                    save(step, total)
                done(step)
        """,
    "a function": """
        def keep(step, total):
            if step % every != 999:
                return
            with context():
                save(step, total)

        def main():
            total = 0
            for step in range(begin(), 12):
                total += step
                stepped(step)
                keep(step, total)
                done(step)
        """,
    "a generator's batches": """
        def batches(first):
            step = first
            while step < 12:
                yield step
                step += 1

        def main():
            total = 0
            for step in batches(begin()):
                total += step
                stepped(step)
                if step % every == 999:
                    save(step, total)
                done(step)
        """,
    "while, match, a closure": """
        def main():
            total, step = 0, begin()
            def keep():
                save(step, total)
            while step < 12:
                total += step
                stepped(step)
                match step % every:
                    case 999:
                        keep()
                done(step)
                step += 1
        """,
    "try and with": """
        def main():
            total = 0
            for step in range(begin(), 12):
                with context():
                    total += step
                    stepped(step)
                    try:
                        if step % every == 999 and step:
                            save(step, total)
                    finally:
                        done(step)
        """,
    "with in with": """
        def main():
            total = 0
            for step in range(begin(), 12):
                total += step
                stepped(step)
                if step % every == 999:
                    with context() as outer:
                        kept = outer
                        with context() as inner:
                            save(step, max([each for each in [total, 0] if step >= -1]))
                        kept = inner
                done(step)
        """,
    "a module": """
        total = 0
        for step in range(begin(), 12):
            total += step
            stepped(step)
            if step % every == 999:
                save(step, total)
            done(step)
        """,
}


class Saves:
    def is_save(self, call: ast.Call, target: object | None) -> bool:
        return getattr(call.func, "id", "") == "save"

    def payload(self, call: ast.Call) -> ast.expr | None:
        return None


class Run:
    """One run of a script: what it did, in order. `act` comes after the step AT."""

    def __init__(self, path: Path, source: str, act: Callable[[Run, FrameType], None]) -> None:
        path.write_text(textwrap.dedent(source))
        self.did: list[tuple[str, int]] = []
        self.totals: list[int] = []
        self.script: scripts.Script | None = None
        self._act = act
        self._code = compile(path.read_text(), str(path), "exec")

    def go(self) -> Run:
        """In a thread of its own, as trainings under Ray: no frame of the tests is around the script's."""
        with ThreadPoolExecutor(1) as training:
            training.submit(self._here).result()
        return self

    def _here(self) -> None:
        space: dict[str, Any] = {
            "__name__": "script",
            "every": 1000,
            "begin": lambda: 0,
            "stepped": self._stepped,
            "save": self._save,
            "done": lambda step: self.did.append(("done", step)),
            "context": Nothing,
        }
        exec(self._code, space)
        if "main" in space:
            space["main"]()
        if self.script is not None:
            self.script.cancel()

    def _stepped(self, step: int) -> None:
        self.did.append(("step", step))
        if step == AT:
            frame = sys._getframe(1)
            self.script = scripts.find(frame, Saves())
            self._act(self, frame)

    def _save(self, step: int, total: int) -> None:
        self.did.append(("save", step))
        self.totals.append(total)

    def left(self) -> None:
        self.did.append(("left", AT))


class Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def enter(run: Run, frame: FrameType) -> None:
    assert run.script is not None
    assert run.script.enter(frame, run.left, wait=False) is bool(run.script.points)


def replay(run: Run, frame: FrameType) -> None:
    """A save under Ray does not return: what returns is the reason why nothing was reported."""
    assert run.script is not None
    assert run.script.replay(frame).endswith("was run, and saved nothing")


@pytest.fixture(autouse=True)
def _tried_out_again() -> Iterator[None]:
    trial.refusal.cache_clear()
    yield
    trial.refusal.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_save_runs_once_at_its_place_with_the_values_of_its_step(tmp_path: Path, shape: str) -> None:
    run = Run(tmp_path / "script.py", SHAPES[shape], enter).go()
    at = run.did.index(("step", AT))
    assert [what for what in run.did if what[0] == "step"] == [("step", step) for step in range(STEPS)]
    assert [what for what in run.did if what[0] == "done"] == [("done", step) for step in range(STEPS)]
    assert run.did[at + 1] == ("save", AT) and run.did.count(("save", AT)) == 1
    assert run.did.count(("left", AT)) == 1
    assert run.totals == [sum(range(AT + 1))]


@pytest.mark.parametrize("shape", SHAPES)
def test_so_does_its_replay(tmp_path: Path, shape: str) -> None:
    run = Run(tmp_path / "script.py", SHAPES[shape], replay).go()
    assert run.did[run.did.index(("step", AT)) + 1] == ("save", AT)
    assert run.totals == [sum(range(AT + 1))]


def test_an_interpreter_that_stays_on_its_line_has_no_save_that_could_be_entered_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jumps, "jump", lambda frame, line: line)
    monkeypatch.setattr(sys, "version", "3.15.0 (main)")
    run = Run(tmp_path / "script.py", SHAPES["a block"], enter).go()
    assert run.script is not None and not run.script.points and not run.script.near
    assert run.script.because == "cpython 3.15.0 does not let lastcall enter a save"
    assert len(run.did) == 2 * STEPS
