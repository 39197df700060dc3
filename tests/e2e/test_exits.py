"""How a block and its process end: what is saved, what is said, and the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery, environment
from lastcall import testing

NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0"}
LONG = {"LASTCALL_KILL_WAIT_SECONDS": "9"}
PROGRAM = """
    import os
    import signal
    import sys
    import threading
    import time
    import lastcall
    from helpers.models import training

    def tell(signum=signal.SIGTERM):
        os.kill(os.getpid(), signum)
        while not run._driver.notified:
            time.sleep(0.001)

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        if run._driver:
            run._subject.copy_every_boundary()  # a copy at each boundary, however busy this machine is
        for step in run.steps(12):
            optimizer.zero_grad()
            model.loss(training.batch()).backward()
            if step == 5:
                WHAT
            optimizer.step()
    training.finish(model=model, optimizer=optimizer)
"""


def life(nursery: Nursery, folder: Path, what: str, program: str = PROGRAM, **env: str) -> Child:
    script = nursery.write(folder, program.replace("WHAT", what))
    return nursery.run(folder, script, folder / "run", folder / "result", **env)


def undisturbed(nursery: Nursery, folder: Path) -> str:
    assert life(nursery, folder, "pass", LASTCALL_ENABLED="0").code == 0
    return (folder / "result").read_text()


@pytest.mark.parametrize("what", ["sys.exit()", "sys.exit(0)", "raise SystemExit(None)", "sys.exit(3)"])
def test_b10_sys_exit_with_a_notice_pending_is_a_stop(nursery: Nursery, tmp_path: Path, what: str) -> None:
    child = life(nursery, tmp_path, f"tell(); {what}", **LONG)
    assert child.code == chain.SAVED, child.log()
    testing.assert_resumable(tmp_path / "run", 5, exact=True)
    assert "The script called sys.exit() after SIGTERM: the run stops, and its state is saved" in child.log()
    assert "finished" not in child.log()


def test_b10_a_handler_inside_the_block_that_calls_sys_exit_is_a_stop(
    nursery: Nursery, tmp_path: Path
) -> None:
    what = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); os.kill(os.getpid(), signal.SIGTERM); "
        "time.sleep(9)"
    )
    expected = undisturbed(nursery, tmp_path)
    child = life(nursery, tmp_path, what, **LONG)
    assert child.code == chain.SAVED, child.log()
    testing.assert_resumable(tmp_path / "run", 5, exact=True)
    assert life(nursery, tmp_path, "pass").code == 0
    assert (tmp_path / "result").read_text() == expected


def test_b10_sys_exit_after_a_notice_that_cannot_be_saved_is_the_signals_own(
    nursery: Nursery, tmp_path: Path
) -> None:
    # behind ours: the step has begun
    torn = "optimizer._optimizer_step_pre_hooks[-1] = lambda *_: (tell(), sys.exit(0))"
    child = life(nursery, tmp_path, torn, **LONG)
    assert child.code == -signal.SIGTERM, child.log()
    assert chain.records(tmp_path / "run") == []


def test_f5_sys_exit_without_a_notice_saves_and_is_not_called_finished(
    nursery: Nursery, tmp_path: Path
) -> None:
    expected = undisturbed(nursery, tmp_path)
    child = life(nursery, tmp_path, "sys.exit()")
    assert child.code == 0, child.log()
    assert "sys.exit() left the block at step 5; checkpoint-5 is saved (exact)" in child.log()
    assert "finished" not in child.log()
    assert '"outcome": "left"' in (tmp_path / "run" / ".lastcall" / "events-0.jsonl").read_text()
    again = life(nursery, tmp_path, "pass")
    assert "resumed 5" in again.lines() and (tmp_path / "result").read_text() == expected


def test_f5_sys_exit_after_the_last_step_is_the_end(nursery: Nursery, tmp_path: Path) -> None:
    program = PROGRAM.replace("optimizer.step()\n", "optimizer.step()\n        sys.exit()\n")
    child = life(nursery, tmp_path, "pass", program)
    assert child.code == 0, child.log()
    assert "Training finished at step 12" in child.log()
    assert '"outcome": "finished"' in (tmp_path / "run" / ".lastcall" / "events-0.jsonl").read_text()


def test_f17_an_exception_saves_the_last_completed_step_and_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    expected = undisturbed(nursery, tmp_path)
    child = life(nursery, tmp_path, "raise ValueError('a bad batch')")
    assert child.code == 1, child.log()
    assert "ValueError: a bad batch" in child.log()
    entry = testing.assert_resumable(tmp_path / "run", 5, exact=True)
    assert entry.record.reason == "ValueError: a bad batch"
    again = life(nursery, tmp_path, "pass")
    assert "resumed 5" in again.lines() and (tmp_path / "result").read_text() == expected


def test_f17_ctrl_c_saves_and_is_pythons_own(nursery: Nursery, tmp_path: Path) -> None:
    child = life(nursery, tmp_path, "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)")
    assert child.code == -signal.SIGINT, child.log()
    assert "Ctrl-C left the block at step 5; checkpoint-5 is saved" in child.log()
    testing.assert_resumable(tmp_path / "run", 5, exact=True)


@pytest.mark.parametrize("what", ["raise ValueError", "sys.exit()", "raise KeyboardInterrupt"])
def test_f17_left_unsaved_is_one_clear_line(nursery: Nursery, tmp_path: Path, what: str) -> None:
    child = life(nursery, tmp_path, what, LASTCALL_ON_ERROR="leave")
    assert (
        child.log().count(
            "left the block at step 5, which is not saved: LASTCALL_ON_ERROR is 'leave'; "
            "there is no checkpoint"
        )
        == 1
    )
    assert chain.records(tmp_path / "run") == []


def test_f17_what_is_torn_is_left_unsaved_and_said(nursery: Nursery, tmp_path: Path) -> None:
    child = life(nursery, tmp_path, "optimizer._optimizer_step_pre_hooks[-1] = lambda *_: 1 / 0")
    assert child.code == 1
    assert "which is not saved: ZeroDivisionError came inside optimizer.step()" in child.log()


def test_f17_an_exception_before_the_first_step_saves_nothing_and_says_nothing(
    nursery: Nursery, tmp_path: Path
) -> None:
    child = life(nursery, tmp_path, "pass", PROGRAM.replace("print(", "raise ValueError; print("))
    assert child.code == 1
    assert "left the block" not in child.log() and chain.records(tmp_path / "run") == []


WORKERS = """
    import os
    import signal
    import time
    import torch
    import lastcall
    from helpers.models import training

    def kill(*_):
        hooks.clear()
        for child in map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split()):
            os.kill(child, signal.SIGKILL)
        time.sleep(0.5)

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.full((4,), float(index))

    training.parts()  # for its seeds
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    hooks = optimizer._optimizer_step_pre_hooks
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1, prefetch_factor=1)
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer, data=loader) as run:
        print("resumed", run.resumed, flush=True)
        if run._driver:
            run._subject.copy_every_boundary()  # a copy at each boundary, however busy this machine is
        for epoch in run.epochs(1):
            batches = run.batches(loader)
            for batch in batches:
                if run.step == 5:
                    WHAT
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    training.finish(model=model, optimizer=optimizer)
"""  # noqa: E501


@pytest.mark.parametrize(("kill", "step"), [("kill()", 5), ("hooks[-1] = kill", 6)])
def test_b13_a_killed_dataloader_worker_loses_no_step(
    nursery: Nursery, tmp_path: Path, kill: str, step: int
) -> None:
    """torch raises it wherever the main thread is, but not inside optimizer.step(), where it would tear the
    weights."""
    assert life(nursery, tmp_path, "pass", WORKERS, LASTCALL_ENABLED="0").code == 0
    expected = (tmp_path / "result").read_text()
    child = life(nursery, tmp_path, kill, WORKERS)
    assert child.code == 1, child.log()
    assert "killed by signal" in child.log() or "exited unexpectedly" in child.log()
    entry = testing.assert_resumable(tmp_path / "run", exact=True)
    assert entry.record.step >= step and f"{entry.path.name} is saved" in child.log()
    again = life(nursery, tmp_path, "pass", WORKERS)
    assert f"resumed {entry.record.step}" in again.lines() and (tmp_path / "result").read_text() == expected


def test_c5_a_thread_of_the_users_does_not_keep_a_saved_process(nursery: Nursery, tmp_path: Path) -> None:
    what = "threading.Thread(target=time.sleep, args=(1e6,)).start(); tell()"
    child = life(nursery, tmp_path, what, LASTCALL_GRACE_SECONDS="2.5", **NOW)
    assert child.code == chain.SAVED, child.log()
    assert "This process has saved but does not exit" in child.log()
    testing.assert_resumable(tmp_path / "run", exact=True)


def test_c5_an_exit_function_that_hangs_does_not_keep_a_saved_process(
    nursery: Nursery, tmp_path: Path
) -> None:
    child = life(
        nursery,
        tmp_path,
        "import atexit; atexit.register(time.sleep, 1e6); tell()",
        LASTCALL_GRACE_SECONDS="2.5",
        **NOW,
    )
    assert child.code == chain.SAVED, child.log()


CAUGHT = """
    import sys
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    try:
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            for step in run.steps(100_000):
                training.say(step)
                training.step(model, optimizer)
    except BaseException as error:
        print("caught", type(error).__name__, flush=True)
        END
    print("end", flush=True)
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(1)", "raise ValueError"])
def test_f14_whoever_catches_preempted_around_the_block_leaves_with_75_all_the_same(
    nursery: Nursery, tmp_path: Path, end: str
) -> None:
    script = nursery.write(tmp_path, CAUGHT.replace("END", end))
    child = nursery.start(tmp_path, script, tmp_path / "run", tmp_path / "result", **NOW)
    child.expect("at 3")
    child.send(signal.SIGTERM)
    assert child.wait() == chain.SAVED, child.log()
    assert "caught Preempted" in child.lines() and ("end" in child.lines()) == (end == "pass")


SWALLOWS = """
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        while True:
            try:
                training.say(run.step)
                training.step(model, optimizer)
                run.tick()
            except BaseException as error:
                print("swallowed", type(error).__name__, flush=True)
"""


def test_c8_a_loop_that_swallows_everything_is_left_at_the_second_preempted(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = nursery.write(tmp_path, SWALLOWS)
    child = nursery.start(tmp_path, script, tmp_path / "run", tmp_path / "result", **NOW)
    child.expect("at 3")
    child.send(signal.SIGTERM)
    assert child.wait() == chain.SAVED, child.log()
    assert child.lines().count("swallowed Preempted") == 1
    assert "The training loop caught Preempted and continued: leaving with exit code 75" in child.log()
    testing.assert_resumable(tmp_path / "run", exact=True)


@pytest.mark.parametrize(("which", "word"), [("SIG_IGN", "be ignored"), ("SIG_DFL", "kill the process")])
def test_c8_a_signal_that_the_script_turns_off_is_taken_back(
    nursery: Nursery, tmp_path: Path, which: str, word: str
) -> None:
    source = f"""
        import signal
        import lastcall
        from helpers.models import training

        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            signal.signal(signal.SIGTERM, signal.{which})
            for step in run.steps(100_000):
                training.say(step)
                training.step(model, optimizer)
    """
    script = nursery.write(tmp_path, source)
    child = nursery.start(tmp_path, script, tmp_path / "run", tmp_path / "result", **NOW)
    child.expect_log(f"SIGTERM was set to {word} inside the block")
    child.send(signal.SIGTERM)
    assert child.wait() == chain.SAVED, child.log()
    assert child.log().count("inside the block") == 1


def test_f17_a_terminal_that_hangs_up_saves(nursery: Nursery, tmp_path: Path) -> None:
    # whoever runs us
    program = PROGRAM.replace(
        "import sys\n", "import sys\n    signal.signal(signal.SIGHUP, signal.SIG_DFL)\n", 1
    )
    child = life(nursery, tmp_path, "tell(signal.SIGHUP)", program, **NOW)
    assert child.code == chain.SAVED, child.log()
    assert testing.assert_resumable(tmp_path / "run", exact=True).record.reason == "SIGHUP"
    (tmp_path / "other").mkdir()
    unsaved = life(
        nursery,
        tmp_path / "other",
        "os.kill(os.getpid(), signal.SIGHUP); time.sleep(9)",
        program,
        LASTCALL_ON_ERROR="leave",
    )
    assert unsaved.code == -signal.SIGHUP, unsaved.log()
    assert "Got SIGHUP at step 5, which is not saved because LASTCALL_ON_ERROR is 'leave'" in unsaved.log()


def test_h9_sighup_under_nohup_saves_where_it_is_configured(nursery: Nursery, tmp_path: Path) -> None:
    ignored = PROGRAM.replace(
        "import sys\n", "import sys\n    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does\n", 1
    )
    quiet = life(nursery, tmp_path, "os.kill(os.getpid(), signal.SIGHUP)", ignored, **NOW)
    assert quiet.code == 0, quiet.log()
    (tmp_path / "other").mkdir()
    child = life(
        nursery, tmp_path / "other", "tell(signal.SIGHUP)", ignored, LASTCALL_SIGNALS="SIGTERM,SIGHUP", **NOW
    )
    assert child.code == chain.SAVED, child.log()


MISFIT = """
    import os
    import torch
    import lastcall
    from helpers.models import training

    model = torch.nn.Linear(4, int(os.environ["WIDTH"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        for step in run.steps(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
"""


def test_f16_a_checkpoint_that_does_not_fit_is_one_sentence_and_78(nursery: Nursery, tmp_path: Path) -> None:
    assert life(nursery, tmp_path, "", MISFIT, WIDTH="2").code == 0
    child = life(nursery, tmp_path, "", MISFIT, WIDTH="3")
    assert child.code == 78, child.log()
    assert "lastcall: MismatchError: " in child.log() and "Traceback" not in child.log()
    assert "Traceback" in life(nursery, tmp_path, "", MISFIT, WIDTH="3", LASTCALL_LOG_LEVEL="DEBUG").log()


def test_f16_state_that_cannot_be_saved_is_one_sentence_and_78(nursery: Nursery, tmp_path: Path) -> None:
    child = life(
        nursery,
        tmp_path,
        "",
        MISFIT.replace("optimizer=optimizer)", "optimizer=optimizer, bad=lambda: 1)"),
        WIDTH="2",
    )
    assert child.code == 78, child.log()
    assert "lastcall: StateError: " in child.log() and "Traceback" not in child.log()


def test_f16_what_the_script_catches_is_its_own(nursery: Nursery, tmp_path: Path) -> None:
    program = (
        "try:\n    lastcall.protect('run', bad=lambda: 1)\nexcept lastcall.StateError:\n    print('caught')\n"
    )
    child = life(nursery, tmp_path, "", "import lastcall\n" + program)
    assert child.code == 0 and child.lines() == ["caught"] and child.log() == ""


def test_ctrl_c_in_a_paused_run_is_130_without_a_traceback(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "run" / ".lastcall").mkdir(parents=True)
    (tmp_path / "run" / ".lastcall" / "pause.json").write_text("{}")
    script = nursery.write(tmp_path, PROGRAM.replace("WHAT", "pass"))
    child = nursery.start(tmp_path, script, tmp_path / "run", tmp_path / "result")
    child.expect_log("This run is paused")
    child.send(signal.SIGINT)
    assert child.wait() == 130, child.log()
    assert "Traceback" not in child.log() and "the run stays paused" in child.log()


HUNG = """
    import os
    import signal
    import subprocess
    import sys
    import time
    import torch
    import lastcall
    from lastcall.storage import objects

    class Teardown:
        def __del__(self):
            os.write(1, b"taken apart\\n")

    objects.FolderStore.send = lambda *_, **__: time.sleep(1e6)
    sys.last_of_all = Teardown()  # goes when the interpreter does
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = lastcall.JITCheckpointConfig(kill_wait=0, grace=4, mirror=f"file://{os.getcwd()}/mirror")
    with lastcall.protect("run", config=config, model=model, optimizer=optimizer) as run:
        for step in run.steps(10**9):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            if step == 5:
                subprocess.Popen(["sh", "-c", f"sleep 4; kill -KILL {os.getpid()}"])  # the platform, at the deadline
                os.kill(os.getpid(), signal.SIGTERM)
"""  # noqa: E501


def test_h5_a_hung_mirror_and_the_interpreters_teardown_do_not_outlast_the_grace(tmp_path: Path) -> None:
    """The process leaves with its code before the deadline, and takes nothing apart on its way: that alone
    took most of a second."""
    (tmp_path / "train.py").write_text(textwrap.dedent(HUNG))
    (tmp_path / "mirror").mkdir()
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == chain.SAVED, done.stderr  # and not killed
    assert done.stdout == "", done.stderr
    assert "The newest checkpoint is only in" in done.stderr  # it was not waited for
    testing.assert_resumable(tmp_path / "run", exact=True)
