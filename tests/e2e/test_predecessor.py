"""A replacement starts while the one before it is still in its grace and saving: it waits, and goes on from
what that one saved."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery

SLOW = Path(__file__).parent / "scripts" / "slow_disk.py"
NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0", "LASTCALL_GRACE_SECONDS": "600"}
SCRIPT = """
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        for step in run.steps(60):
            training.say(step)
            training.step(model, optimizer)
    training.finish(model=model, optimizer=optimizer)
"""


class Case:
    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self._nursery = nursery
        self._script = nursery.write(folder, SCRIPT)

    def start(self, run: Path | None = None, /, **env: str) -> Child:
        where = run or self.run
        return self._nursery.start(
            self.folder, SLOW, self._script, where, where.with_suffix(".result"), **{**NOW, **env}
        )

    def saving(self, **env: str) -> Child:
        """One that has a notice and is in the middle of its save, for as long as the test wants."""
        child = self.start(SLOW_DISK="disk", **env)
        child.expect("at 7")
        child.send(signal.SIGTERM)
        child.expect("waiting for the disk")
        return child

    def go_on(self) -> None:
        (self.folder / "disk").touch()

    def uninterrupted(self) -> str:
        assert self.start(self.folder / "peace").wait() == 0
        return (self.folder / "peace.result").read_text()


@pytest.mark.parametrize("locks", [{}, {"NO_LOCKS": "1"}], ids=["with locks", "without locks"])
def test_the_next_one_waits_for_the_save_and_ends_with_the_same_bits(
    nursery: Nursery, tmp_path: Path, locks: dict[str, str]
) -> None:
    case = Case(nursery, tmp_path)
    first = case.saving(**locks)
    second = case.start(IMPATIENT="1", **locks)
    second.expect_log(f"Waiting for process {first.pid} on ")
    assert "was asked to stop (SIGTERM) and may still be saving" in second.log()
    assert second.lines() == [] and not list(case.run.glob("checkpoint-*"))
    case.go_on()
    assert first.wait() == 75, first.log()
    (saved,) = (int(str(record["step"])) for record in chain.records(case.run))
    assert second.wait() == 0, second.log()
    assert second.lines()[0] == f"resumed {saved}" and saved >= 7
    assert "The directory is free after" in second.log()
    assert case.run.with_suffix(".result").read_text() == case.uninterrupted()
    assert not list((case.run / ".lastcall").glob("leaving*"))


def test_one_that_is_killed_while_it_saves_is_not_waited_for_any_longer(
    nursery: Nursery, tmp_path: Path
) -> None:
    case = Case(nursery, tmp_path)
    first = case.saving()
    second = case.start(IMPATIENT="1")
    second.expect_log("Waiting for process")
    first.send(signal.SIGKILL)
    assert second.wait() == 0, second.log()
    assert second.lines()[0] == "resumed None"
    assert case.run.with_suffix(".result").read_text() == case.uninterrupted()


def test_who_is_told_to_stop_while_it_waits_leaves_at_once_and_changes_nothing(
    nursery: Nursery, tmp_path: Path
) -> None:
    case = Case(nursery, tmp_path)
    first = case.saving()
    second = case.start(IMPATIENT="1")
    second.expect_log("Waiting for process")
    second.send(signal.SIGTERM)
    assert second.wait() == 75, second.log()
    assert "came before the first step: there is nothing to save" in second.log()
    case.go_on()
    assert first.wait() == 75, first.log()
    assert [record["kind"] for record in chain.records(case.run)] == ["jit"]


def test_one_that_comes_back_after_its_time_commits_nothing_over_the_next(
    nursery: Nursery, tmp_path: Path
) -> None:
    """No locks, and it is frozen for longer than its grace, as on a machine that was cut off."""
    case = Case(nursery, tmp_path)
    first = case.saving(NO_LOCKS="1")
    for told in (case.run / ".lastcall").glob("leaving-*.json"):
        told.unlink()  # its grace is over, as far as the next one can tell
    second = case.start(NO_LOCKS="1")
    assert second.wait() == 0, second.log()
    before = sorted(path.name for path in case.run.glob("checkpoint-*"))
    case.go_on()
    assert first.wait() != 75, first.log()
    assert "JIT checkpoint failed" in first.log()
    assert sorted(path.name for path in case.run.glob("checkpoint-*")) == before
    assert case.run.with_suffix(".result").read_text() == case.uninterrupted()
