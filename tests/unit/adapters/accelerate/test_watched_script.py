"""What lastcall finds out at the first completed step of a script that saves itself; what it does later."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from lastcall import errors
from lastcall.adapters.accelerate import watched_script
from lastcall.adapters.accelerate.watched_script import WatchedScript
from lastcall.settings import JITCheckpointConfig


class Session:
    """In the place of a ScriptSession: notes what it is asked to do. `due`: the next step saves."""

    busy = False
    due = False

    def __init__(self, jit: JITCheckpointConfig, private: Path | None, nbytes: Callable[[], int]) -> None:
        self.log: list[Any] = []
        self.private, self.nbytes = private, nbytes
        self.why_not, self.notified = "", False
        self.save = SimpleNamespace(steps=0, many=False, due=lambda: self.due)

    def listen(self) -> None:
        if self.busy:
            raise errors.BusyError("a run is already protected in this process")

    def start(self, resumed: str | None) -> Any:
        self.log.append(("start", resumed))
        return "participants"

    def begin_save(self) -> str:
        return "occasion"

    def end_save(self, path: Path, *, answers: bool) -> None:
        self.log.append(("saved", path.name, answers))

    def let_go(self, *, ignore: bool = False) -> None:
        self.log.append("let go")


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Session]:
    """Those that were made."""
    made: list[Session] = []

    def make(*given: Any) -> Session:
        made.append(Session(*given))
        return made[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watched_script, "ScriptSession", make)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return made


def watched(**jit: Any) -> WatchedScript:
    return WatchedScript(JITCheckpointConfig(**jit, environ={}))


ACCELERATOR = SimpleNamespace(save_state=lambda folder: None)


def saving(script: WatchedScript, steps: int = 1) -> None:
    """A training loop with a save of its own."""
    for step in range(steps):
        if step % 500 == 499:
            ACCELERATOR.save_state(f"out/step_{step}")
        script.stepped(sys._getframe())


def never_saving(script: WatchedScript) -> None:
    script.stepped(sys._getframe())


def below(module: str, script: WatchedScript) -> None:
    """The step is taken by a frame of this module."""
    names: dict[str, Any] = {"__name__": module, "script": script, "sys": sys}
    exec("script.stepped(sys._getframe())", names)


@pytest.mark.parametrize("module", ["transformers.trainer", "lastcall.adapters.torch.run"])
def test_under_a_trainer_or_protect_nothing_is_done(module: str, sessions: list[Session]) -> None:
    script = watched()
    below(module, script)
    assert script.idle and sessions == []


def test_beside_a_run_that_is_protected_nothing_is_done(
    sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "busy", True)
    script = watched()
    saving(script)
    assert script.idle and sessions[0].log == []


def test_a_script_with_a_save_in_its_loop_is_protected_from_its_first_step_on(
    sessions: list[Session], caplog: pytest.LogCaptureFixture
) -> None:
    script = watched()
    with caplog.at_level("INFO", "lastcall"):
        saving(script, steps=3)
    (session,) = sessions
    assert session.log == [("start", None)] and session.save.steps == 3 and not script.idle
    assert "A notice will run the script's own save: " in caplog.text
    assert str(script.participants) == "participants"


def test_a_script_without_a_save_is_left_alone_and_warned(
    sessions: list[Session], caplog: pytest.LogCaptureFixture
) -> None:
    script = watched()
    never_saving(script)
    assert script.idle and sessions[0].log == ["let go"]
    assert "This script is not protected: " in caplog.text


def test_a_script_that_never_loads_is_warned_before_anything_is_lost(
    sessions: list[Session], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_script.resuming, "why_not", lambda *_: "the script never calls load_state()")
    saving(watched())
    assert "the same command would not resume from it: the script never calls load_state()" in caplog.text
    assert sessions[0].why_not == "the script never calls load_state()"


def test_the_checkpoint_that_the_script_has_loaded_is_what_it_resumes_from(
    sessions: list[Session], tmp_path: Path
) -> None:
    script = watched()
    script.loaded(tmp_path / "out" / "step_7", main_process=True)
    saving(script)
    assert sessions[0].log == [("start", "step_7")]


@pytest.mark.parametrize(("folder", "writes"), [("", True), (".", False)])
def test_events_are_written_where_the_script_does_not_look_for_its_checkpoints(
    folder: str, writes: bool, tmp_path: Path, sessions: list[Session]
) -> None:
    directory = tmp_path / "events" if not folder else tmp_path
    saving(watched(directory=str(directory)))
    assert (sessions[0].private is not None) is writes


def test_a_save_before_the_first_step_or_without_a_notice_answers_none(
    sessions: list[Session], tmp_path: Path
) -> None:
    script = watched()
    assert script.begin_save() is None
    script.end_save(tmp_path / "step_0")
    saving(script)
    assert script.begin_save() is None
    script.end_save(tmp_path / "step_1")
    assert sessions[0].log == [("start", None), ("saved", "step_1", False)]


def test_a_step_that_is_due_enters_the_save_once(
    sessions: list[Session], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = watched()
    saving(script)
    entered: list[FrameType] = []

    def enter(frame: FrameType, left: Callable[[], None], *, wait: bool) -> bool:
        entered.append(frame)
        return True

    monkeypatch.setattr(script, "_script", SimpleNamespace(enter=enter))
    monkeypatch.setattr(Session, "due", True)
    saving(script, steps=2)
    assert len(entered) == 1 and str(script.begin_save()) == "occasion"
    script.end_save(tmp_path / "step_2")
    assert sessions[0].log[-1] == ("saved", "step_2", True)


def test_a_save_writes_about_the_parameters_and_what_the_optimizer_keeps_of_them() -> None:
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert watched_script._bytes_of(optimizer) == 400
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert watched_script._bytes_of(SimpleNamespace(optimizer=optimizer)) == 800
