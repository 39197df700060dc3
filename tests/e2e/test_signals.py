"""Signals from outside, exit codes, and what lastcall leaves behind in a process: nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes import live_processes as running
from helpers.processes.forkserver import Child, Nursery, until
from lastcall import testing

PLAIN = """
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        for step in run.steps(STEPS):
            training.say(step)
            training.step(model, optimizer)
    training.finish(model=model, optimizer=optimizer)
"""
ENDLESS = PLAIN.replace("STEPS", "100_000")
SHORT = PLAIN.replace("STEPS", "12")
NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0"}


def start(nursery: Nursery, folder: Path, source: str, **env: str) -> Child:
    script = nursery.write(folder, source)
    return nursery.start(folder, script, folder / "run", folder / "result", **env)


def interrupt(child: Child, signum: int = signal.SIGTERM) -> int:
    """Send a signal in the middle of training, and wait for the end."""
    child.expect("at 3")
    child.send(signum)
    return child.wait()


@pytest.mark.smoke
def test_a_saved_run_exits_75_and_holds_an_exact_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, ENDLESS, **NOW)
    assert interrupt(child) == 75
    entry = testing.assert_resumable(tmp_path / "run", exact=True)
    assert (entry.record.kind.value, entry.record.reason) == ("jit", "SIGTERM")
    assert entry.record.step in (chain.position(child), chain.position(child) + 1)


def test_the_exit_code_can_be_chosen(nursery: Nursery, tmp_path: Path) -> None:
    assert interrupt(start(nursery, tmp_path, ENDLESS, LASTCALL_EXIT_CODE="85", **NOW)) == 85


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_other_signals_are_notices_when_asked_for(nursery: Nursery, tmp_path: Path, name: str) -> None:
    child = start(nursery, tmp_path, ENDLESS, LASTCALL_SIGNALS=f"SIGTERM,{name}", **NOW)
    assert interrupt(child, signal.Signals[name]) == 75
    assert testing.assert_resumable(tmp_path / "run").record.reason == name


def test_a_run_that_cannot_save_dies_of_the_signal(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import errno
        import lastcall
        from helpers.models import training
        from lastcall import testing

        files = testing.FaultyFiles(testing.Fault("mkdir", 1, errno.EROFS, lasting=True))
        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY, files=files, model=model, optimizer=optimizer) as run:
            for step in run.steps(100_000):
                training.say(step)
                training.step(model, optimizer)
    """
    child = start(nursery, tmp_path, source, **NOW)
    assert interrupt(child) == -signal.SIGTERM
    assert "Read-only file system" in child.log()
    assert "Nothing was saved: exiting with SIGTERM" in child.log()


def test_the_log_lines_are_those_of_the_seeds_and_training_goes_on_in_the_kill_wait(
    nursery: Nursery, tmp_path: Path
) -> None:
    child = start(nursery, tmp_path, ENDLESS)
    child.expect("at 3")
    child.send(signal.SIGTERM)
    child.expect_log("SIGTERM received, initiating JIT checkpoint in 3.0s")
    before = chain.position(child)
    until(lambda: chain.position(child) > before + 5, "steps during the kill wait")
    assert not chain.records(tmp_path / "run")
    assert child.wait() == 75
    assert "JIT checkpoint completed in " in child.log()
    assert testing.assert_resumable(tmp_path / "run", exact=True).record.step > before + 5


def test_the_kill_wait_is_cut_short_when_the_grace_would_not_hold_the_save(
    nursery: Nursery, tmp_path: Path
) -> None:
    child = start(nursery, tmp_path, ENDLESS, LASTCALL_GRACE_SECONDS="2")
    assert interrupt(child) == 75
    assert re.search(
        r"Kill wait cut from 3\.0s to [01]\.\ds: the save needs about \d\.\ds and [12]\.\ds are "
        r"left",
        child.log(),
    )


def test_a_second_sigterm_during_the_kill_wait_changes_nothing(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, ENDLESS, LASTCALL_KILL_WAIT_SECONDS="0.5")
    child.expect("at 3")
    child.send(signal.SIGTERM)
    child.expect_log("SIGTERM received")
    child.send(signal.SIGTERM)
    assert child.wait() == 75
    assert child.log().count("SIGTERM received") == child.log().count("JIT checkpoint completed") == 1
    testing.assert_resumable(tmp_path / "run", exact=True)


def test_a_storm_of_signals_is_one_notice(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, ENDLESS, LASTCALL_KILL_WAIT_SECONDS="0.3")
    child.expect("at 3")
    while child.poll() is None:
        child.send_group(signal.SIGTERM)
    assert child.code == 75, child.log()
    assert child.log().count("SIGTERM received") == child.log().count("JIT checkpoint completed") == 1
    testing.assert_resumable(tmp_path / "run", exact=True)


SLOW_DISK = """
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    config = lastcall.JITCheckpointConfig(kill_wait=0, signals=("SIGTERM", "SIGINT"))
    files = training.SlowFiles()
    with lastcall.protect(training.DIRECTORY, config=config, files=files, model=model, optimizer=optimizer) as run:
        for step in run.steps(100_000):
            training.say(step)
            training.step(model, optimizer)
"""  # noqa: E501


def test_a_second_sigterm_during_the_save_changes_nothing(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, SLOW_DISK)
    child.expect("at 3")
    child.send(signal.SIGTERM)
    child.expect("waiting for disk")
    child.send(signal.SIGTERM)
    (tmp_path / "disk").touch()
    assert child.wait() == 75
    testing.assert_resumable(tmp_path / "run", exact=True)


def test_a_second_sigterm_after_the_save_changes_nothing(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import lastcall
        from helpers.models import training

        model, optimizer = training.parts()
        try:
            with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
                for step in run.steps(100_000):
                    training.say(step)
                    training.step(model, optimizer)
        finally:
            training.wait_for("exit")
    """
    child = start(nursery, tmp_path, source, **NOW)
    child.expect("at 3")
    child.send(signal.SIGTERM)
    child.expect("waiting for exit")
    child.send(signal.SIGTERM)
    (tmp_path / "exit").touch()
    assert child.wait() == 75


def test_the_first_ctrl_c_saves_and_exits_130(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, ENDLESS, LASTCALL_SIGNALS="SIGTERM,SIGINT", **NOW)
    assert interrupt(child, signal.SIGINT) == 130
    assert testing.assert_resumable(tmp_path / "run", exact=True).record.reason == "SIGINT"
    assert "KeyboardInterrupt" not in child.log()


def test_the_second_ctrl_c_leaves_at_once(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, SLOW_DISK)
    child.expect("at 3")
    child.send(signal.SIGINT)
    child.expect("waiting for disk")
    child.send(signal.SIGINT)
    assert child.wait() == 130  # although the disk never answered
    assert "Got SIGINT again: exiting at once" in child.log()
    assert not chain.records(tmp_path / "run")


def test_ctrl_c_is_pythons_own_unless_asked_for(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, ENDLESS, **NOW)
    assert interrupt(child, signal.SIGINT) == -signal.SIGINT
    assert "KeyboardInterrupt" in child.log()


def test_a_handler_that_was_there_is_called_as_well_and_put_back(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import signal
        import sys
        import lastcall
        from helpers.models import training

        def mine(signum, frame):
            print("mine", signum, flush=True)

        signal.signal(signal.SIGTERM, mine)
        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY + "-short", model=model, optimizer=optimizer) as run:
            for step in run.steps(2):
                training.step(model, optimizer)
        print("back", signal.getsignal(signal.SIGTERM) is mine, signal.set_wakeup_fd(-1), flush=True)
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            for step in run.steps(100_000):
                training.say(step)
                training.step(model, optimizer)
    """
    child = start(nursery, tmp_path, source, **NOW)
    assert child.expect("back") == "back True -1"
    assert interrupt(child) == 75
    assert child.lines().count(f"mine {signal.SIGTERM:d}") == 1


def test_an_exception_leaves_no_handler_no_thread_and_no_hook_behind(
    nursery: Nursery, tmp_path: Path
) -> None:
    source = """
        import signal
        import threading
        import lastcall
        from helpers.models import training

        model, optimizer = training.parts()
        before = signal.getsignal(signal.SIGTERM)
        try:
            with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
                for step in run.steps(10):
                    training.step(model, optimizer)
                    if step == 4:
                        raise ValueError("as users do")
        except ValueError as error:
            print("caught", error)
        print("handler", signal.getsignal(signal.SIGTERM) is before, signal.set_wakeup_fd(-1))
        print("threads", [thread.name for thread in threading.enumerate() if thread.name.startswith("lastcall")])
        training.step(model, optimizer)
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            print("again", run.resumed)
    """  # noqa: E501
    child = start(nursery, tmp_path, source)
    assert child.wait() == 0, child.log()
    assert child.lines() == ["caught as users do", "handler True -1", "threads []", "again 5"]


def test_switched_off_there_is_no_thread_no_handler_and_no_file(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import signal
        import threading
        import lastcall
        from helpers.models import training

        model, optimizer = training.parts()
        before = signal.getsignal(signal.SIGTERM)
        config = lastcall.JITCheckpointConfig(enabled=False)
        with lastcall.protect(training.DIRECTORY, config=config, model=model, optimizer=optimizer) as run:
            for step in run.steps(3):
                training.step(model, optimizer)
            print(run.step, run.resumed, run.save())
            print(signal.getsignal(signal.SIGTERM) is before, signal.set_wakeup_fd(-1), threading.active_count())
    """  # noqa: E501
    child = start(nursery, tmp_path, source)
    assert child.wait() == 0, child.log()
    assert child.lines() == ["3 None None", "True -1 1"]
    assert not (tmp_path / "run").exists()


def test_a_group_sigterm_does_not_take_the_workers_before_the_run_has_saved(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = Path(__file__).parent / "scripts" / "epochs.py"
    child = nursery.start(tmp_path, script, tmp_path / "run", tmp_path / "result", LOADER="persistent", **NOW)
    child.expect("at 5")
    child.send_group(signal.SIGTERM)
    assert child.wait() == 75, child.log()
    assert "DataLoader worker" not in child.log()
    testing.assert_resumable(tmp_path / "run", exact=True)
    until(lambda: not alive(child.pid), "the workers' end")


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return any(int(fields[2]) == group and fields[0] != "Z" for _, fields in running.stats())


def test_a_wrong_setting_exits_78_and_names_the_variable_the_value_and_the_remedy(
    nursery: Nursery, tmp_path: Path
) -> None:
    child = start(nursery, tmp_path, ENDLESS, LASTCALL_KILL_WAIT_SECONDS="soon")
    assert child.wait() == 78
    assert "LASTCALL_KILL_WAIT_SECONDS='soon'" in child.log()
    assert "export LASTCALL_KILL_WAIT_SECONDS=3.0" in child.log()
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_saved_is_refused_at_once_with_its_path(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import lastcall
        from helpers.models import training

        model, optimizer = training.parts()
        try:
            lastcall.protect(training.DIRECTORY, model=model, extra={"good": 1, "bad": [0, lambda: 1]})
        except lastcall.StateError as error:
            print("refused", error)
    """
    child = start(nursery, tmp_path, source)
    assert child.wait() == 0, child.log()
    said = child.expect("refused")
    assert "extra" in said and "bad" in said and "1" in said
    assert not (tmp_path / "run").exists()


def test_two_runs_cannot_share_a_directory(nursery: Nursery, tmp_path: Path) -> None:
    first = start(nursery, tmp_path, ENDLESS, **NOW)
    first.expect("at 3")
    source = "from lastcall.core.startup import takeover as succession\nsuccession.PATIENCE = 0.3\n"
    (tmp_path / "second").mkdir()
    script = nursery.write(tmp_path / "second", source + "import runpy, sys\nrunpy.run_path(sys.argv[3])")
    second = nursery.run(tmp_path, script, tmp_path / "run", tmp_path / "result", tmp_path / "script.py")
    assert second.code == 1
    assert f"BusyError: {tmp_path / 'run'} is in use by process {first.pid}" in second.log()
    assert first.poll() is None
    assert interrupt(first) == 75


def test_a_run_waits_for_its_predecessor_on_its_way_out(nursery: Nursery, tmp_path: Path) -> None:
    first = start(nursery, tmp_path, SLOW_DISK)
    first.expect("at 3")
    first.send(signal.SIGTERM)
    first.expect("waiting for disk")
    second = start(nursery, tmp_path, SHORT)
    (tmp_path / "disk").touch()
    assert first.wait() == 75
    assert second.expect("resumed") == f"resumed {chain.position(first) + 1}"


def test_a_finished_run_started_again_does_nothing(nursery: Nursery, tmp_path: Path) -> None:
    first = start(nursery, tmp_path, SHORT)
    assert first.wait() == 0
    result = (tmp_path / "result").read_text()
    before = chain.records(tmp_path / "run")
    (tmp_path / "result").unlink()
    second = start(nursery, tmp_path, SHORT)
    assert second.wait() == 0
    assert second.lines() == ["resumed 12"]
    assert (tmp_path / "result").read_text() == result
    assert chain.records(tmp_path / "run") == before


AFTERWARDS = """
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        for step in run.steps(12):
            training.say(step)
            training.step(model, optimizer)
        training.wait_for("inside")
    training.wait_for("outside")
    training.finish(model=model, optimizer=optimizer)
"""


def test_sigterm_after_the_last_step_needs_no_answer(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, AFTERWARDS)
    (tmp_path / "outside").touch()
    child.expect("waiting for inside")
    child.send(signal.SIGTERM)
    child.expect_log("SIGTERM received")
    (tmp_path / "inside").touch()
    assert child.wait() == 0, child.log()
    assert "Training finished: the notice needs no answer" in child.log()
    testing.assert_resumable(tmp_path / "run", 12, exact=True)


def test_sigterm_after_the_block_is_nobodys_business_and_nothing_is_lost(
    nursery: Nursery, tmp_path: Path
) -> None:
    child = start(nursery, tmp_path, AFTERWARDS)
    (tmp_path / "inside").touch()
    child.expect("waiting for outside")
    child.send(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    (tmp_path / "outside").touch()
    again = start(nursery, tmp_path, AFTERWARDS)
    assert again.wait() == 0
    assert not [line for line in again.lines() if line.startswith("at ")]


def test_sigterm_before_protect_is_nobodys_business(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, "from helpers.models import training\ntraining.wait_for('never')")
    child.expect("waiting")
    child.send(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM


def test_sigterm_during_the_start_is_answered_at_the_first_boundary(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import lastcall
        from helpers.models import training

        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            training.wait_for("data")
            for step in run.steps(100_000):
                training.say(step)
                training.step(model, optimizer)
    """
    child = start(nursery, tmp_path, source, **NOW)
    child.expect("waiting for data")
    child.send(signal.SIGTERM)
    child.expect_log("SIGTERM received")
    (tmp_path / "data").touch()
    assert child.wait() == 75
    assert testing.assert_resumable(tmp_path / "run", exact=True).record.step <= 1


def test_a_notice_in_the_first_step_of_a_tick_loop_is_answered_at_its_end(
    nursery: Nursery, tmp_path: Path
) -> None:
    source = """
        import lastcall
        from helpers.models import training

        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            while True:
                training.say(run.step)
                training.interrupt_first_pass(run)
                training.step(model, optimizer)
                run.tick()
    """
    for step in (1, 2, 3):
        child = start(nursery, tmp_path, source, INTERRUPT="1", **NOW)
        assert child.wait() == 75, child.log()
        testing.assert_resumable(tmp_path / "run", step, exact=True)
