from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.cli.harness import HOLD, Cli
from helpers.processes.forkserver import environment
from helpers.processes.scripts import Script, eventually
from lastcall import events, testing
from lastcall.cli import watch

FIELDS = {
    "schema",
    "at",
    "directory",
    "state",
    "outcome",
    "pid",
    "run",
    "incarnation",
    "resumed",
    "step",
    "total",
    "epoch",
    "total_epochs",
    "metrics",
    "eval_metrics",
    "steps_per_second",
    "eta_seconds",
    "progress_at",
    "saving",
    "last_save",
    "notice",
    "not_saved",
    "paused",
}


class Told:
    """A run as far as readers see it: its events and its progress, written as a session writes them, a while
    ago."""

    def __init__(self, root: Path, ago: float = 1000.0) -> None:
        self.root = root
        self.clock = testing.FakeClock(time.time() - ago)
        self.log = events.EventLog(root / ".lastcall" / "events-0.jsonl", self.clock)
        self.progress = events.Progress(root / ".lastcall" / "progress.json", self.clock, total=1000)

    def event(self, kind: str, **fields: object) -> Told:
        self.clock.advance(1.0)
        self.log.emit(kind, **fields)
        self.log.flush()
        return self

    def start(self, incarnation: int = 1, resumed: str | None = None) -> Told:
        return self.event("start", incarnation=incarnation, resumed=resumed, seconds=0.1)

    def committed(self, step: int, save: str = "jit") -> Told:
        made = {
            "save": save,
            "step": step,
            "exact": True,
            "because": "",
            "seconds": 0.5,
            "written": 100,
            "path": f"checkpoint-{step}",
        }
        return self.event("committed", **made)

    def at(self, step: int, **metrics: object) -> Told:
        self.clock.advance(1.0)
        self.progress.update(step, 2.0, metrics)
        self.progress.flush()
        return self


@pytest.fixture
def told(tmp_path: Path) -> Told:
    (tmp_path / "run" / ".lastcall").mkdir(parents=True)
    return Told(tmp_path / "run")


def look(cli: Cli, told: Told) -> Any:
    said = cli("watch", told.root, "--once", "--json")
    assert said.code == 0, said.err
    return said.json


# ---- how a run stands --------------------------------------------------------------------------------------


def test_a_directory_in_which_nothing_has_run_is_idle(cli: Cli, told: Told) -> None:
    said = look(cli, told)
    assert set(said) == FIELDS
    assert (said["state"], said["step"], said["outcome"], said["metrics"]) == ("idle", None, None, {})


@pytest.mark.parametrize("outcome", ["finished", "saved", "not saved", "failed"])
def test_a_run_that_has_stopped_says_how(cli: Cli, told: Told, outcome: str) -> None:
    told.start().at(10, loss=0.5).event("stop", outcome=outcome, step=12).at(11)  # the scribe comes last
    said = look(cli, told)
    assert (said["state"], said["outcome"], said["step"]) == ("ended", outcome, 12)


def test_a_run_that_left_no_word_was_killed(cli: Cli, told: Told) -> None:
    told.start().at(10)
    said = look(cli, told)
    assert (said["state"], said["outcome"], said["step"], said["pid"]) == ("ended", "killed", 10, None)


def test_a_process_that_holds_the_directory_is_running_until_it_is_killed(
    cli: Cli, told: Told, tmp_path: Path
) -> None:
    with Script(tmp_path, HOLD.format(root=str(told.root))) as script:
        script.expect("held")
        assert look(cli, told)["state"] == "starting"
        told.start(3, "checkpoint-5").at(9, loss=0.25)
        said = look(cli, told)
        assert (said["state"], said["pid"], said["incarnation"], said["resumed"]) == (
            "running",
            script.pid,
            3,
            "checkpoint-5",
        )
        assert (said["step"], said["total"], said["epoch"], said["metrics"]) == (9, 1000, 2.0, {"loss": 0.25})
        script.send(signal.SIGKILL)
        script.wait()
        said = look(cli, told)
        assert (said["state"], said["outcome"]) == ("ended", "killed")


def test_a_paused_run_is_pausing_while_it_is_there_and_paused_once_it_has_left(
    cli: Cli, told: Told, tmp_path: Path
) -> None:
    pause = told.root / ".lastcall" / watch.PAUSE
    with Script(tmp_path, HOLD.format(root=str(told.root))) as script:
        script.expect("held")
        told.start()
        pause.write_text(json.dumps({"at": time.time(), "by": "ada"}))
        assert look(cli, told)["state"] == "pausing"
    told.committed(4).event("stop", outcome="saved", step=4)
    said = look(cli, told)
    assert (said["state"], said["outcome"], said["paused"]["by"]) == ("paused", "saved", "ada")
    assert "paused (saved, incarnation 1, asked for by ada)" in cli("watch", told.root, "--once").out
    pause.write_text("nonsense")
    assert look(cli, told)["paused"] == {}


def test_signs_of_life_count_where_the_lock_of_another_machine_is_not_seen(cli: Cli, told: Told) -> None:
    Told(told.root, ago=-600.0).start()  # however slow this test is
    assert look(cli, told)["state"] == "running"


def test_without_any_locks_silence_decides(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "owner", lambda path: (None, None))
    told.start()
    assert watch.Watcher(told.root).look().state == "ended"
    Told(told.root, ago=30.0).start()
    assert watch.Watcher(told.root).look().state == "running"
    monkeypatch.setattr(watch, "owner", lambda path: (None, os.getpid()))
    Told(told.root, ago=500.0).start()
    assert watch.Watcher(told.root).look().state == "running"  # the process is on this machine


def test_what_a_run_says_of_saves_and_notices_is_told(cli: Cli, told: Told) -> None:
    told.start().committed(5, "periodic").event("save-begins", save="periodic", step=6, bytes=9)
    told.event("not-saved", save="periodic", step=6, because="the disk is full")
    said = look(cli, told)
    assert said["last_save"]["path"] == "checkpoint-5"
    assert said["not_saved"]["because"] == "the disk is full"
    told.event("notice", source="signal", reason="SIGTERM", deadline_in=30.0).committed(7).event(
        "stop", outcome="saved", step=7
    )
    said = look(cli, told)
    assert (said["notice"]["reason"], said["not_saved"], said["last_save"]["step"], said["saving"]) == (
        "SIGTERM",
        None,
        7,
        None,
    )
    line = cli("watch", told.root, "--once").out
    assert "ended (saved, incarnation 1); step 7" in line
    assert "last save checkpoint-7 (jit, exact, took 0.50 s, " in line
    assert "notice SIGTERM (from signal, " in line


def test_a_new_incarnation_forgets_the_notice_and_the_progress_of_the_one_before(
    cli: Cli, told: Told
) -> None:
    told.start().at(90, loss=0.1).event(
        "notice", source="signal", reason="SIGTERM", deadline_in=None
    ).committed(80)
    told.event("stop", outcome="saved", step=80).start(2, "checkpoint-80")
    said = look(cli, told)
    assert (said["notice"], said["metrics"], said["step"], said["incarnation"]) == (None, {}, 80, 2)


def test_the_time_left_runs_down_between_two_reports(told: Told, tmp_path: Path) -> None:
    now = Told(told.root, ago=10.0)
    with Script(tmp_path, HOLD.format(root=str(told.root))) as script:
        script.expect("held")
        now.start().at(100).at(110)  # ten steps a second; 890 are left
        status = watch.Watcher(told.root).look()
        assert status.progress["eta_seconds"] == pytest.approx(89.0)
        assert status.at - status.progress["at"] > 5.0
        assert status.eta == pytest.approx(max(89.0 - (status.at - status.progress["at"]), 0.0))


def test_epochs_and_what_an_evaluation_gave_are_shown(cli: Cli, told: Told) -> None:
    told.progress.total_epochs = 3
    told.progress.update(1, eval_metrics={"eval_loss": 0.75})
    told.start().at(500, loss=0.5, learning_rate=1e-5)
    said = look(cli, told)
    assert (said["epoch"], said["total_epochs"], said["eval_metrics"]) == (2.0, 3, {"eval_loss": 0.75})
    line = cli("watch", told.root, "--once").out
    assert "; epoch 2 of 3; metrics loss 0.5, learning_rate 1e-05; evaluation eval_loss 0.75" in line


def test_files_that_make_no_sense_are_no_error(cli: Cli, told: Told) -> None:
    told.start()
    private = told.root / ".lastcall"
    (private / "progress.json").write_text(
        '{"step": "x", "metrics": [1], "at": "now", "eta_seconds": {}, "total": true}'
    )
    with (private / "events-0.jsonl").open("ab") as file:
        file.write(
            b'[1]\nnot json\n{"kind": ["committed"]}\n{"kind": "committed", "path": 3, "at": '
            b'"x"}\n{"kind": "notice"}\n'
        )
    (private / "lock").write_text("me")
    assert cli("watch", told.root, "--once").code == 0
    assert look(cli, told)["step"] is None


# ---- the log is read on ------------------------------------------------------------------------------------


def kinds(log: watch.Log) -> list[object]:
    return [event.get("n") for event in log.news()]


def test_each_event_is_read_once_also_over_a_rotation_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    log, clock = watch.Log(path), testing.FakeClock()
    assert kinds(log) == []
    written = events.EventLog(path, clock, limit_bytes=300)
    seen: list[object] = []
    for number in range(50):
        written.emit("x", n=number)
        written.flush()
        seen += kinds(log)
    assert seen == list(range(50))
    with path.open("ab") as file:
        file.write(b'{"n": 50')
    assert kinds(log) == []
    with path.open("ab") as file:
        file.write(b"}\n")
    assert kinds(log) == [50]


def test_a_watch_that_comes_late_reads_what_was_rotated_away_too(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    written = events.EventLog(path, testing.FakeClock(), limit_bytes=300)
    for number in range(10):
        written.emit("x", n=number)
        written.flush()
    assert kinds(watch.Log(path)) == [event["n"] for event in events.read(path)]


# ---- how it is shown ---------------------------------------------------------------------------------------


def watching(root: Path, *more: str, stdout: int, **env: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-u", "-m", "lastcall", "watch", str(root), "--interval", "0.05", *more]
    return subprocess.Popen(argv, text=True, env=environment(**env), stdout=stdout)


def test_a_pipe_gets_a_line_for_each_change_until_the_run_ends(told: Told, tmp_path: Path) -> None:
    (tmp_path / "holder").mkdir()
    with Script(tmp_path / "holder", HOLD.format(root=str(told.root))) as script:
        script.expect("held")
        told.start().at(1, loss=0.5)
        process = watching(told.root, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert "; step 1 of 1000 (0.1%); epoch 2; metrics loss 0.5" in process.stdout.readline()
        told.at(2, loss=0.25)
        assert "step 2 of 1000" in process.stdout.readline()
        told.committed(2)
        assert "last save checkpoint-2" in process.stdout.readline()
        told.event("stop", outcome="finished", step=2)
        script.send(signal.SIGKILL)
        rest, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    assert "ended (finished, incarnation 1)" in rest.splitlines()[-1]


def test_json_is_a_line_for_each_look_and_forever_outlives_the_run(told: Told) -> None:
    told.start().event("stop", outcome="saved", step=5)
    process = watching(told.root, "--forever", "--json", stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["state"] for _ in range(3)] == ["ended"] * 3
        Told(told.root, ago=0.0).start(2)
        assert eventually(lambda: json.loads(process.stdout.readline())["incarnation"] == 2)  # type: ignore[union-attr]
    finally:
        process.kill()
        process.communicate(timeout=90)


def test_a_terminal_is_written_over_in_place_and_no_line_wraps(told: Told) -> None:
    told.start().at(1, **{f"a_long_name_of_a_metric_{n}": n for n in range(20)})
    ours, theirs = pty.openpty()
    process = watching(told.root, "--forever", stdout=theirs, COLUMNS="80", TERM="xterm", NO_COLOR="1")
    try:
        drawn = read_until(ours, lambda text: text.count("\x1b[J") >= 2)
    finally:
        process.kill()
        process.wait(90)
        os.close(ours)
        os.close(theirs)
    block = drawn.split("\x1b[J")[1].split("\x1b[")[0].splitlines()
    assert block[0] == str(told.root)[:79]
    assert f"\x1b[{len(block)}A\r\x1b[J" in drawn
    assert max(map(len, block)) <= 79
    assert [line.split()[0] for line in block[1:]] == ["state", "step", "epoch", "metrics"]


def read_until(fd: int, enough: Callable[[str], bool]) -> str:
    text = ""
    while not enough(text):
        text += os.read(fd, 10_000).decode()
    return text
