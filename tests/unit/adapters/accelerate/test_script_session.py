"""A watched script from its first completed step to its exit: the test is the training thread."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from helpers.ranks.thread_ranks import PATIENCE
from lastcall.adapters.accelerate import atomic
from lastcall.adapters.accelerate.script_session import ScriptSession
from lastcall.core.notice.phases import Phase
from lastcall.core.process import exits
from lastcall.settings import JITCheckpointConfig


class Died(BaseException):
    """The process would have died of a signal."""


@pytest.fixture(autouse=True)
def still_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that the process would have died of."""
    found: list[int] = []

    def die(signum: int) -> NoReturn:
        found.append(signum)
        raise Died

    monkeypatch.setattr(exits, "die_of", die)
    monkeypatch.setattr(exits, "see_out", lambda code, deadline: None)
    return found


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptSession]]:
    """Sessions that answer notices, below a launcher; signals are not listened to."""
    (tmp_path / "registry").mkdir()
    monkeypatch.setenv("LASTCALL_REGISTRY", str(tmp_path / "registry"))
    made: list[ScriptSession] = []

    def make(**jit: Any) -> ScriptSession:
        config = JITCheckpointConfig(**{"kill_wait": 0.0, **jit}, environ={})
        made.append(ScriptSession(config, tmp_path / "private", lambda: 0))
        made[-1].start("step_3")
        return made[-1]

    yield make
    for session in made:
        session.let_go()


def notified(session: ScriptSession) -> None:
    session._inbox.notify_signal(15)
    phases = session._inbox.phases
    assert phases.wait_while(set(Phase) - {Phase.BOUNDARY}, PATIENCE) is Phase.BOUNDARY


def step(session: ScriptSession) -> bool:
    session.save.steps += 1
    return session.save.due()


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "private/events-0.jsonl").read_text().splitlines()]


def member(folder: Path) -> dict[str, Any]:
    """What the launcher knows of this process."""
    found: dict[str, Any] = json.loads((folder / f"registry/member-{os.getpid()}.json").read_text())
    return found


def test_the_launcher_learns_of_the_process_before_any_notice(
    begun: Callable[..., ScriptSession], tmp_path: Path
) -> None:
    begun()
    assert (member(tmp_path)["step"], member(tmp_path)["outcome"]) == (0, None)


def test_a_notice_is_answered_by_the_save_after_the_next_step(
    begun: Callable[..., ScriptSession], tmp_path: Path
) -> None:
    session = begun()
    assert not step(session)
    notified(session)
    assert step(session) and session.notified
    assert session.begin_save().resumes
    session.end_save(tmp_path / "out" / "step_2", answers=True)
    assert session.conclude(saved=True)
    assert session.preempted().code == 75
    kinds = [event["kind"] for event in events(tmp_path) if event["kind"] != "phase"]
    assert kinds == ["start", "notice", "save-begins", "committed", "stop"]
    committed = next(event for event in events(tmp_path) if event["kind"] == "committed")
    assert (committed["path"], committed["because"]) == ("step_2", atomic.NOT_EXACT)
    known = member(tmp_path)
    assert (known["outcome"], known["checkpoint"], known["stays"]) == ("saved", "step_2", "")


def test_where_the_same_command_would_not_resume_the_code_is_the_signals_own(
    begun: Callable[..., ScriptSession], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = begun()
    session.why_not = "the script never calls load_state()"
    notified(session)
    assert step(session) and not session.begin_save().resumes and session.conclude(saved=True)
    assert session.preempted().code == 128 + 15
    assert "the same command would not resume from it: the script never calls load_state()" in caplog.text
    assert member(tmp_path)["stays"] == session.why_not


def test_a_save_of_the_scripts_own_without_a_notice_is_only_a_checkpoint_for_the_launcher(
    begun: Callable[..., ScriptSession], tmp_path: Path
) -> None:
    session = begun()
    session.end_save(tmp_path / "out" / "step_500", answers=False)
    session._stop()
    assert member(tmp_path)["checkpoint"] == "step_500"
    assert [event["kind"] for event in events(tmp_path)] == ["start", "stop"]


def test_where_nothing_is_saved_the_process_dies_of_the_signal_and_says_so_before(
    begun: Callable[..., ScriptSession], tmp_path: Path, still_here: list[int]
) -> None:
    session = begun()
    notified(session)
    assert step(session) and not session.conclude(saved=False)
    with pytest.raises(Died):
        session.die()
    assert still_here == [15] and events(tmp_path)[-1]["outcome"] == "not saved"


def test_a_second_ctrl_c_leaves_at_once(begun: Callable[..., ScriptSession], still_here: list[int]) -> None:
    session = begun(kill_wait=20.0)
    session._on_signal(2, 1)
    assert still_here == []
    with pytest.raises(Died):
        session._on_signal(2, 2)
    assert still_here == [2]


def test_without_a_notice_the_exit_of_the_interpreter_is_the_end_of_the_run(
    begun: Callable[..., ScriptSession], tmp_path: Path
) -> None:
    session = begun()
    session._at_exit(os.getpid() + 1)  # of a forked child
    assert member(tmp_path)["outcome"] is None
    session._at_exit(os.getpid())
    assert member(tmp_path)["outcome"] == events(tmp_path)[-1]["outcome"] == "finished"
