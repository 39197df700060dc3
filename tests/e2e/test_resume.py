"""What a start finds, and what it does about it; periodic saves, rotation, and a disk that is full."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery, until
from lastcall import testing

NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0"}
PLAIN = """
    import os
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, "step", run.step, flush=True)
        for step in run.steps(int(os.environ.get("STEPS", "20"))):
            training.say(step)
            training.step(model, optimizer)
    training.finish(model=model, optimizer=optimizer)
"""


class Case:
    def __init__(self, nursery: Nursery, folder: Path, source: str = PLAIN, run: Path | None = None) -> None:
        self._nursery = nursery
        self._folder = folder
        self._script = nursery.write(folder, source)
        self.run = run or folder / "run"
        self.result = folder / "result"

    def start(self, **env: str) -> Child:
        return self._nursery.start(self._folder, self._script, self.run, self.result, **{**NOW, **env})

    def finished(self, **env: str) -> Child:
        child = self.start(**env)
        assert child.wait() == 0, child.log()
        return child

    def kinds(self) -> list[tuple[str, int]]:
        """Kind and step of what is committed, oldest first."""
        return [(str(record["kind"]), int(str(record["step"]))) for record in chain.records(self.run)]


def damage(folder: Path) -> None:
    """Turn one bit in the middle of the largest file."""
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_an_empty_directory_is_a_fresh_start(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path)
    case.run.mkdir()
    child = case.finished()
    assert child.lines()[0] == "resumed None step 0"
    assert "Starting from the beginning" in child.log()
    assert case.kinds() == [("final", 20)]


def test_a_run_knows_where_it_was_resumed(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path)
    case.finished(STEPS="7")
    child = case.finished()
    assert child.lines()[:2] == ["resumed 7 step 7", "at 7"]
    assert "Resuming from checkpoint-7 (step 7, final" in child.log()


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_serves(
    nursery: Nursery, tmp_path: Path
) -> None:
    case = Case(nursery, tmp_path)
    case.finished()
    reference = case.result.read_text()
    shutil.rmtree(case.run)
    case.finished(STEPS="12", LASTCALL_SAVE_STEPS="5")
    # the one at 5 may have been written still when 10 was due
    earlier, last = [step for _, step in case.kinds()][-2:]
    assert last == 12
    damage(case.run / "checkpoint-12")
    child = case.finished()
    assert "set checkpoint-12 aside as checkpoint-12.damaged-0" in child.log()
    assert child.lines()[0] == f"resumed {earlier} step {earlier}"
    assert (case.run / "checkpoint-12.damaged-0" / "lastcall.json").exists()
    assert case.result.read_text() == reference


def test_with_every_checkpoint_damaged_the_run_begins_anew(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path)
    case.finished()
    reference = case.result.read_text()
    damage(case.run / "checkpoint-20")
    child = case.finished()
    assert child.lines()[0] == "resumed None step 0"
    assert case.result.read_text() == reference


def test_what_was_never_completed_is_removed(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path)
    case.finished(STEPS="7")
    incomplete = case.run / "checkpoint-99"
    shutil.copytree(case.run / "checkpoint-7", incomplete)
    (incomplete / "checkpoint-is-incomplete.txt").touch()
    shutil.copytree(incomplete, case.run / ".lastcall" / "staging" / "checkpoint-98")
    child = case.finished()
    assert "removed checkpoint-99: it was never completed" in child.log()
    assert child.lines()[0] == "resumed 7 step 7"
    assert not incomplete.exists()
    assert not (case.run / ".lastcall" / "staging" / "checkpoint-98").exists()


def test_folders_of_others_are_left_alone(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path)
    foreign = case.run / "checkpoint-500"
    foreign.mkdir(parents=True)
    (foreign / "model.bin").write_text("of another framework")
    child = case.finished()
    assert child.lines()[0] == "resumed None step 0"
    assert (foreign / "model.bin").read_text() == "of another framework"


def test_a_changed_model_is_refused_with_its_path_and_both_shapes(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import os
        import torch
        import lastcall
        from helpers.models import training

        model = torch.nn.Sequential(torch.nn.Linear(4, int(os.environ["WIDTH"])))
        with lastcall.protect(training.DIRECTORY, model=model) as run:
            print("resumed", run.resumed)
            for step in run.steps(3):
                pass
    """
    case = Case(nursery, tmp_path, source)
    case.finished(WIDTH="8")
    before = case.kinds()
    child = case.start(WIDTH="9")
    assert child.wait() == 78
    assert "MismatchError" in child.log()
    for part in ("model", "0.weight", "8, 4", "9, 4"):
        assert part in child.log().splitlines()[-1], child.log()
    assert case.kinds() == before
    case.finished(WIDTH="8")


@pytest.mark.parametrize(("limit", "kept"), [("1", 2), ("2", 2), ("3", 3)])
def test_no_more_checkpoints_are_kept_than_asked_for_but_two_at_least(
    nursery: Nursery, tmp_path: Path, limit: str, kept: int
) -> None:
    case = Case(nursery, tmp_path)
    case.finished(LASTCALL_SAVE_STEPS="2", LASTCALL_SAVE_TOTAL_LIMIT=limit)
    assert len(case.kinds()) == kept
    assert case.kinds()[-1][1] == 20
    testing.assert_resumable(case.run, 20, exact=True)


def test_with_save_best_only_nothing_worse_is_saved(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import lastcall
        from helpers.models import training

        losses = [5, 4, 6, 1, 2, 6, 7, 0.5, 8, 9]
        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            for step in run.steps(len(losses)):
                training.step(model, optimizer)
                run.report(loss=losses[step])
                training.wait_until_saved(run)
    """
    case = Case(nursery, tmp_path, source)
    env = {"LASTCALL_SAVE_STEPS": "1", "LASTCALL_MONITOR": "loss", "LASTCALL_SAVE_BEST_ONLY": "1"}
    case.finished(**env)
    assert case.kinds() == [("periodic", 1), ("periodic", 2), ("periodic", 4), ("periodic", 8), ("final", 10)]


def test_the_best_checkpoint_outlives_the_rotation(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import lastcall
        from helpers.models import training

        accuracy = [1, 2, 9, 3, 4, 5, 6, 7, 8, 1]
        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            for step in run.steps(len(accuracy)):
                training.step(model, optimizer)
                run.report(accuracy=accuracy[step])
                training.wait_until_saved(run)
    """
    case = Case(nursery, tmp_path, source)
    env = {"LASTCALL_SAVE_STEPS": "1", "LASTCALL_MONITOR": "accuracy", "LASTCALL_MODE": "max"}
    case.finished(LASTCALL_SAVE_TOTAL_LIMIT="2", **env)
    assert [step for _, step in case.kinds()] == [3, 9, 10]


def test_an_epoch_strategy_saves_at_the_end_of_epochs(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        from torch.utils.data import DataLoader
        import lastcall
        from helpers.models import training

        model, optimizer = training.parts()
        loader = DataLoader(training.Sentences(20), batch_size=4)
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer, data=loader) as run:
            for epoch in run.epochs(3):
                training.wait_until_saved(run)
                for tokens in run.batches(loader):
                    optimizer.zero_grad()
                    model.loss(tokens).backward()
                    optimizer.step()
    """
    case = Case(nursery, tmp_path, source)
    case.finished(LASTCALL_SAVE_STRATEGY="epoch")
    assert case.kinds() == [("periodic", 5), ("periodic", 10), ("periodic", 15)]


SLOW_DISK = """
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    periodic = lastcall.PeriodicCheckpointConfig(save_steps=5)
    files = training.SlowFiles()
    with lastcall.protect(training.DIRECTORY, periodic=periodic, files=files, model=model, optimizer=optimizer) as run:
        for step in run.steps(100_000):
            training.say(step)
            training.step(model, optimizer)
"""  # noqa: E501


def test_training_goes_on_while_a_periodic_save_is_written_and_a_notice_loses_neither(
    nursery: Nursery, tmp_path: Path
) -> None:
    case = Case(nursery, tmp_path, SLOW_DISK)
    child = case.start()
    child.expect("waiting for disk")
    until(lambda: chain.position(child) >= 12, "steps while the disk is slow")
    child.expect_log("Periodic save at step 10 is delayed: the previous one is still being written")
    assert case.kinds() == []
    child.send(signal.SIGTERM)
    child.expect_log("SIGTERM received")
    (tmp_path / "disk").touch()
    assert child.wait() == 75
    (first, second) = case.kinds()
    assert first == ("periodic", 5)
    assert second[0] == "jit" and second[1] > 12
    testing.assert_resumable(case.run, second[1], exact=True)


def test_save_inside_a_pass_is_not_exact_and_an_exact_one_follows(nursery: Nursery, tmp_path: Path) -> None:
    source = """
        import json
        import lastcall
        from helpers.models import training

        def show(path):
            record = json.loads((path / "lastcall.json").read_text())
            print(path.name, record["kind"], "exact" if record["exact"] else record["because"], flush=True)

        model, optimizer = training.parts()
        with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
            show(run.save())
            for step in run.steps(4):
                training.step(model, optimizer)
                if step == 2:
                    show(run.save())
                if step == 3:
                    show(run.directory / "checkpoint-3")
            show(run.save())
    """
    child = Case(nursery, tmp_path, source).finished()
    assert child.lines()[0] == "checkpoint-0 manual exact"
    assert "saved in the middle of a step" in child.lines()[1]
    assert child.lines()[2:] == ["checkpoint-3 manual exact", "checkpoint-4 manual exact"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


LARGE = """
    import torch
    import lastcall
    from helpers.models import training

    training.seed()
    weights = torch.nn.Parameter(torch.zeros(400_000))
    optimizer = torch.optim.AdamW([weights])
    with lastcall.protect(training.DIRECTORY, weights=weights, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        for step in run.steps(100_000):
            training.say(step)
            weights.grad = torch.randn_like(weights)
            optimizer.step()
"""


def test_a_full_disk_is_warned_of_early_and_leaves_what_was_there_intact(
    nursery: Nursery, tmp_path: Path, small_disk: Path
) -> None:
    case = Case(nursery, tmp_path, LARGE, small_disk / "run")
    first = case.start(LASTCALL_SPARE="0")
    first.expect("at 3")
    first.send(signal.SIGTERM)
    assert first.wait() == 75, first.log()
    (_, step), *_ = case.kinds()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(4_000_000))

    second = case.start(LASTCALL_SPARE="0")
    second.expect_log("The next checkpoint needs 4.8 MB")
    second.send(signal.SIGTERM)
    assert second.wait() == -signal.SIGTERM
    assert f"checkpoint-{step} is intact" in second.log()
    assert "make room in" in second.log()
    testing.assert_resumable(case.run, step, exact=True)

    filler.unlink()
    third = case.start(LASTCALL_SPARE="0")
    assert third.expect("resumed") == f"resumed {step}"
    third.expect(f"at {step + 3}")
    third.send(signal.SIGTERM)
    assert third.wait() == 75, third.log()
    testing.assert_resumable(case.run, exact=True)


def test_spare_space_serves_when_the_disk_has_got_full_meanwhile(
    nursery: Nursery, tmp_path: Path, small_disk: Path
) -> None:
    case = Case(nursery, tmp_path, LARGE, small_disk / "run")
    child = case.start()
    until(lambda: spare_bytes(case.run) > 1_000_000, f"spare space\n{child.log()}")
    (small_disk / "filler").write_bytes(bytes(5_500_000))
    child.send(signal.SIGTERM)
    assert child.wait() == 75, child.log()
    testing.assert_resumable(case.run, exact=True)


def spare_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in (run / ".lastcall" / "spare").glob("*") if path.is_file())


def test_the_events_tell_the_story(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path)
    child = case.start(STEPS="100000")
    child.expect("at 3")
    child.send(signal.SIGTERM)
    assert child.wait() == 75
    events = [
        json.loads(line) for line in (case.run / ".lastcall" / "events-0.jsonl").read_text().splitlines()
    ]
    phases = [event["phase"] for event in events if event["kind"] == "phase"]
    assert [event["kind"] for event in events if event["kind"] != "phase"] == [
        "start",
        "notice",
        "save-begins",
        "committed",
        "stop",
    ]
    # On a busy machine the training thread may take over before the agent has said that it waits for a
    # boundary.
    assert [phase for phase in phases if phase != "boundary"] == [
        "waiting",
        "holding",
        "saving",
        "committed",
        "leaving",
    ]
