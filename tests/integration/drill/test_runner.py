"""Drills of real processes that stand in for a training run: every way in which a run can come back, or
not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from helpers.drill import harness
from helpers.processes.forkserver import until

SOON = ("--after", "0.2", "--grace", "10")


def test_a_run_that_saves_comes_back_with_nothing_lost_each_time(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, *SOON, "--times", 3, "--json", *harness.trainer(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    body = harness.reported(done)
    assert body["ok"] and body["problem"] is None and body["lost"] == 0 and body["log"] is None
    assert [one["round"] for one in body["rounds"]] == [1, 2, 3]
    saved = [one["directories"][0]["saved"]["step"] for one in body["rounds"]]
    assert saved == [one["directories"][0]["resumed"]["step"] for one in body["rounds"]] == sorted(set(saved))
    assert all(
        one["exit"] == 75 and one["exact"] and not one["killed"] and not one["rescue"]
        for one in body["rounds"]
    )
    assert body["end"] == {"how": "stopped", "exit": 75, "saved": True}
    assert not list(tmp_path.glob("lastcall-drill-*"))


def test_the_phases_follow_each_other(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, *SOON, "--json", *harness.trainer(tmp_path / "run"))
    seconds = harness.reported(done)["rounds"][0]["seconds"]
    assert 0 <= seconds["noticed"] <= seconds["save_begins"] <= seconds["committed"] <= seconds["gone"]
    assert 0 <= seconds["resumed"] <= seconds["first_step"]
    assert seconds["standstill"] >= seconds["first_step"]
    assert seconds["first_output"] >= 0 and seconds["waited"] >= 0


def test_rounds_at_a_step_come_at_its_multiples(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, "--at", 30, "--times", 2, "--json", *harness.trainer(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    first, second = harness.reported(done)["rounds"]
    assert first["step"] >= 30 and second["step"] >= 60


def test_the_table_and_the_verdict_are_on_stdout_and_the_progress_on_stderr(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, *SOON, *harness.trainer(tmp_path / "run"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == str(tmp_path / "run") and lines[1].startswith("ROUND  STEP")
    assert lines[2].endswith("0  nothing lost") and lines[-1] == "1 of 1 round resumed with nothing lost."
    assert "drill: Round 1 of 1: at step" in done.stderr and "first new step after" in done.stderr


def test_a_run_can_be_let_go_on_to_its_end(tmp_path: Path) -> None:
    done = harness.drill(
        tmp_path, *SOON, "--to-the-end", "--json", *harness.trainer(tmp_path / "run", "--steps", 200)
    )
    assert done.returncode == 0, done.stdout
    assert harness.reported(done)["end"] == {"how": "finished", "exit": 0, "saved": True}


def test_a_run_that_finishes_too_early_is_no_success(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, "--after", 60, *harness.trainer(tmp_path / "run", "--steps", 5))
    assert done.returncode == 1
    assert "the run finished before the notice of round 1. Give it more steps" in done.stdout


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("elsewhere", "it restarted in another directory, and so from scratch"),
        ("unsaved", "lost: it could not save: the disk is full"),
        ("inexact", "which it resumed from, is not exact: in the middle of a step"),
        (
            "crash",
            "it did not resume: it exited with exit code 1 before a first step. Last lines of its output: no "
            "module named nowhere",
        ),
    ],
)
def test_a_round_that_loses_something_says_why(tmp_path: Path, fault: str, said: str) -> None:
    done = harness.drill(tmp_path, *SOON, "--json", *harness.trainer(tmp_path / "run", "--fault", fault))
    assert done.returncode == 1, done.stderr
    (one,) = harness.reported(done)["rounds"]
    assert not one["ok"] and said in " ".join(one["reasons"])
    assert one["came_back"] is (fault != "crash")
    if fault in ("elsewhere", "unsaved"):
        assert one["lost"] > 0 and one["directories"][0]["resumed"] is None


def test_a_checkpoint_that_goes_missing_is_noticed(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, *SOON, "--json", *harness.trainer(tmp_path / "run", "--fault", "disk"))
    assert done.returncode == 1
    (one,) = harness.reported(done)["rounds"]
    assert one["lost"] > 0 and one["directories"][0]["saved"] is None
    assert f"a checkpoint was committed, but is no longer in {tmp_path / 'run'}" in one["reasons"][0]


def test_exit_code_0_after_a_save_is_worth_a_word(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, *SOON, *harness.trainer(tmp_path / "run", "--fault", "zero"))
    assert done.returncode == 0
    assert (
        "Round 1: exit code 0 means that training has finished: many platforms would not have restarted it"
        in done.stdout
    )


@pytest.mark.parametrize(
    ("fault", "arguments", "said"),
    [
        ("leave", ("--after", 60), "the run exited before the notice of round 1, with exit code 9"),
        (
            "stall",
            ("--patience", 10),  # until it has joined, on a busy machine as well
            "no step was completed in 10 s. If the first one takes longer, use --patience SECONDS",
        ),
        ("stand", ("--at", 50, "--patience", 1), "the run stands at step 10, and round 1 waits"),
    ],
)
def test_a_run_that_does_not_get_to_the_notice_says_so(
    tmp_path: Path, fault: str, arguments: tuple[object, ...], said: str
) -> None:
    done = harness.drill(
        tmp_path, *arguments, "--grace", 0, *harness.trainer(tmp_path / "run", "--fault", fault)
    )
    assert done.returncode == 1
    assert said in done.stdout
    assert "joined" in (tmp_path / done.stdout.splitlines()[-1].split()[-1]).read_text()


def test_a_run_without_lastcall_is_called_not_protected_and_killed_although_it_ignores_the_signal(
    tmp_path: Path,
) -> None:
    done = harness.drill(
        tmp_path,
        "--patience",
        0.5,
        "--grace",
        0.2,
        "--",
        "sh",
        "-c",
        "trap '' TERM; while :; do sleep 0.1; done",
    )
    assert done.returncode == 1
    assert (
        "this run is not protected: it would lose everything since the last checkpoint of its own"
        in done.stdout
    )
    assert "Wrap the training loop in lastcall.protect()" in done.stdout
    assert "The drill killed the run without a checkpoint, exit code 137." in done.stdout


def test_a_command_that_ends_without_training_is_called_not_protected(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, "--json", "--", "true")
    assert done.returncode == 1
    assert "this run is not protected" in harness.reported(done)["problem"]


def test_a_command_that_fails_at_once_is_quoted(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, "--", "sh", "-c", "echo the data is missing; exit 3")
    assert done.returncode == 1
    assert (
        "it exited with exit code 3 before a first step. Last lines of its output: the data is missing"
        in done.stdout
    )


def test_sigkill_leaves_no_time(tmp_path: Path) -> None:
    done = harness.drill(tmp_path, *SOON, "--signal", "KILL", "--json", *harness.trainer(tmp_path / "run"))
    assert done.returncode == 1
    body = harness.reported(done)
    (one,) = body["rounds"]
    assert (
        one["died_of"] == "SIGKILL"
        and one["exit"] == 137
        and not one["killed"]
        and one["lost"] > 0
        and one["at_least"]
    )
    assert "SIGKILL leaves no time to save" in one["reasons"][0]
    assert body["end"] == {"how": "stopped", "exit": 75, "saved": True}


def test_a_shell_that_keeps_the_signal_to_itself_loses_the_run(tmp_path: Path) -> None:
    line = " ".join(map(str, harness.trainer(tmp_path / "run")[1:])) + "; true"
    done = harness.drill(tmp_path, *SOON, "--json", "--", "bash", "-c", line)
    assert done.returncode == 1
    (one,) = harness.reported(done)["rounds"]
    assert one["died_of"] == "SIGTERM" and one["lost"] > 0
    assert "got no notice. A shell does not forward the signal" in one["reasons"][0]


@pytest.mark.parametrize("to", ["group", "training"])
def test_a_platform_that_signals_more_than_the_command_reaches_the_training_below_a_shell(
    tmp_path: Path, to: str
) -> None:
    line = " ".join(map(str, harness.trainer(tmp_path / "run")[1:])) + "; exit $?"
    done = harness.drill(tmp_path, *SOON, "--to", to, "--json", "--", "bash", "-c", line)
    assert done.returncode == 0, done.stdout
    (one,) = harness.reported(done)["rounds"]
    assert one["lost"] == 0 and one["exit"] == (143 if to == "group" else 75)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drill_leaves_the_run_saved_and_stopped(
    tmp_path: Path, signum: signal.Signals
) -> None:
    process = harness.begin(tmp_path, "--after", 60, "--json", *harness.trainer(tmp_path / "run"))
    try:
        assert process.stderr is not None
        while "the notice comes in" not in (line := process.stderr.readline()):
            assert line, "the drill has ended"
        process.send_signal(signum)
        out, _ = process.communicate(timeout=60)
    finally:
        harness.end(process, tmp_path)
    assert process.returncode == 128 + signum
    assert '"problem": "interrupted by SIG' in out and '"saved": true' in out
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1
    assert not harness.leftovers(tmp_path)


def test_a_second_interruption_kills_at_once(tmp_path: Path) -> None:
    script = "trap '' TERM; touch trapped; while :; do sleep 0.1; done"
    process = harness.begin(tmp_path, "--grace", 600, "--", "sh", "-c", script)
    try:
        assert process.stderr is not None
        assert "Started" in process.stderr.readline()
        until((tmp_path / "trapped").exists, "the trap")
        process.send_signal(signal.SIGINT)
        assert "SIGINT: the drill ends here" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        harness.end(process, tmp_path)
    assert process.returncode == 130 and "The drill killed the run" in out


def test_a_killed_drill_takes_the_run_with_it(tmp_path: Path) -> None:
    process = harness.begin(tmp_path, "--after", 60, *harness.trainer(tmp_path / "run"))
    try:
        assert process.stderr is not None
        while "the notice comes in" not in (line := process.stderr.readline()):
            assert line, "the drill has ended"
        process.kill()
        until(lambda: not harness.leftovers(tmp_path), "the end of the run")
        assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1
    finally:
        harness.end(process, tmp_path)
