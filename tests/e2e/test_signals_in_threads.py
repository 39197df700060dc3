"""Training in a side thread, as under Ray Train, in notebooks and in servers: protected like any other."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery
from lastcall import testing

SOURCE = """
    import threading
    import time
    from concurrent.futures import ThreadPoolExecutor

    import lastcall
    from helpers.models import training

    def train():
        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            print("resumed", run.resumed, flush=True)
            for step in run.steps(STEPS):
                training.say(step)
                training.step(model, optimizer)
        training.finish(model=model, optimizer=optimizer)
        print("trained", flush=True)

    MAIN
    print("main ends", flush=True)
"""
JOINS = "thread = threading.Thread(target=train); thread.start(); thread.join()"
SLEEPS = "thread = threading.Thread(target=train); thread.start(); time.sleep(1000)"
LEAVES = "threading.Thread(target=train).start()"
POOL = "with ThreadPoolExecutor(1) as pool: print(pool.submit(train).exception())"
NOW: dict[str, Any] = {"LASTCALL_KILL_WAIT_SECONDS": "0"}


def start(nursery: Nursery, folder: Path, main: str, steps: int = 100_000, **env: str) -> Child:
    script = nursery.write(folder, SOURCE.replace("MAIN", main).replace("STEPS", str(steps)))
    return nursery.start(folder, script, folder / "run", folder / "result", **env)


@pytest.mark.parametrize("main", [JOINS, SLEEPS, LEAVES, POOL], ids=["joins", "sleeps", "leaves", "pool"])
def test_a_run_in_a_thread_saves_and_the_process_exits_75(
    nursery: Nursery, tmp_path: Path, main: str
) -> None:
    child = start(nursery, tmp_path, main, **NOW)
    child.expect("at 3")
    child.send(signal.SIGTERM)
    assert child.wait() == 75, child.log()
    assert "Cannot listen to signals" not in child.log()
    assert "SIGTERM received" in child.log()
    entry = testing.assert_resumable(tmp_path / "run", exact=True)
    assert (entry.record.kind.value, entry.record.reason) == ("jit", "SIGTERM")
    assert entry.record.step in (chain.position(child), chain.position(child) + 1)
    assert "trained" not in child.lines()


def test_an_interrupted_run_in_a_thread_ends_like_one_that_was_never_interrupted(
    nursery: Nursery, tmp_path: Path
) -> None:
    (tmp_path / "calm").mkdir()
    assert start(nursery, tmp_path / "calm", JOINS, 40).wait() == 0
    first = start(nursery, tmp_path, JOINS, 40, **NOW)
    first.expect("at 3")
    first.send(signal.SIGTERM)
    assert first.wait() == 75, first.log()
    second = start(nursery, tmp_path, JOINS, 40, **NOW)
    assert second.wait() == 0, second.log()
    assert second.lines()[-2:] == ["trained", "main ends"]
    assert (tmp_path / "result").read_text() == (tmp_path / "calm" / "result").read_text()


def test_after_a_run_in_a_thread_the_signal_has_its_own_effect_again(
    nursery: Nursery, tmp_path: Path
) -> None:
    child = start(nursery, tmp_path, JOINS + "\n    training.wait_for('never')", 5)
    child.expect("waiting for never")
    child.send(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert "SIGTERM received" not in child.log()


def test_ctrl_c_saves_a_run_in_a_thread_and_leaves_130(nursery: Nursery, tmp_path: Path) -> None:
    child = start(nursery, tmp_path, JOINS, LASTCALL_SIGNALS="SIGTERM,SIGINT", **NOW)
    child.expect("at 3")
    child.send(signal.SIGINT)
    assert child.wait() == 130, child.log()
    testing.assert_resumable(tmp_path / "run", exact=True)
    assert "KeyboardInterrupt" not in child.log()
