"""The user's own code raises between the notice and its save: the notice is served all the same, where
something whole is left."""

from __future__ import annotations

from pathlib import Path

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery

SCRIPT = """
    import os
    import signal
    import time
    from pathlib import Path
    import lastcall
    from helpers.models import training

    def fail():
        if os.environ.get("LASTCALL_ENABLED") != "0" and not Path("failed").exists():
            Path("failed").touch()
            NOTICE
            raise ValueError("a bad batch")

    def tell():
        os.kill(os.getpid(), signal.SIGTERM)
        while not run._driver.notified:
            time.sleep(0.001)

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        for step in run.steps(12):
            optimizer.zero_grad()
            model.loss(training.batch()).backward()
            if step == 5:
                WHERE
            optimizer.step()
    training.finish(model=model, optimizer=optimizer)
"""
LONG = {"LASTCALL_KILL_WAIT_SECONDS": "9"}
TORN = "optimizer._optimizer_step_pre_hooks[-1] = lambda *_: fail()"  # behind ours: the step has begun


def life(nursery: Nursery, folder: Path, where: str, notice: str = "tell()", **env: str) -> Child:
    script = nursery.write(folder, SCRIPT.replace("WHERE", where).replace("NOTICE", notice))
    return nursery.run(folder, script, folder / "run", folder / "result", **LONG, **env)


def test_a_notice_is_served_although_training_raises_in_the_kill_wait(
    nursery: Nursery, tmp_path: Path
) -> None:
    plain = life(nursery, tmp_path, "fail()", LASTCALL_ENABLED="0")
    assert plain.code == 0, plain.log()
    expected = (tmp_path / "result").read_text()
    first = life(nursery, tmp_path, "fail()")
    assert first.code == chain.SAVED, first.log()
    assert "Traceback" in first.log() and "ValueError: a bad batch" in first.log()
    (record,) = chain.records(tmp_path / "run")
    assert (record["step"], record["kind"], record["exact"]) == (5, "rescue", True)
    last = life(nursery, tmp_path, "fail()")
    assert last.code == 0, last.log()
    assert (tmp_path / "result").read_text() == expected


def test_what_raises_inside_the_optimizer_step_leaves_nothing_to_save(
    nursery: Nursery, tmp_path: Path
) -> None:
    first = life(nursery, tmp_path, TORN)
    assert first.code == 1, first.log()
    assert "ValueError: a bad batch" in first.log()
    assert "before it could stop for the notice (SIGTERM), and nothing is saved" in first.log()
    assert "ValueError came inside optimizer.step()" in first.log()
    assert chain.records(tmp_path / "run") == []


def test_without_a_notice_an_exception_is_the_scripts_own(nursery: Nursery, tmp_path: Path) -> None:
    first = life(nursery, tmp_path, "fail()", notice="pass")
    assert first.code == 1, first.log()
    assert "for the notice" not in first.log() and "ValueError: a bad batch" in first.log()
    (record,) = chain.records(tmp_path / "run")
    assert (record["step"], record["exact"], record["reason"]) == (5, True, "ValueError: a bad batch")
