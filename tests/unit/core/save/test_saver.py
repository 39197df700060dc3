from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from helpers.core.bare_core import SIZES, State, World, content, header_of, put
from lastcall import errors, testing
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.engine import writer
from lastcall.core.restore import restore
from lastcall.core.save import saver
from lastcall.core.save.spare_space import Method
from lastcall.storage import files as storage
from lastcall.types import Kind

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def state() -> State:
    return State(seed=1)


def inode(folder: Path, name: str) -> int:
    return (folder / name).stat().st_ino


# ---- what a commit is --------------------------------------------------------------------------------------


def test_a_commit_is_a_folder_with_the_record_and_what_it_names(world: World, state: State) -> None:
    state.value = {"lr": [0.1]}
    entry = world.saver.save(state.capture(7, metrics={"loss": 0.5}), saver.Request(Kind.JIT, "SIGTERM"))
    assert entry.path == world.catalog.root / "checkpoint-7"
    named = {"state.json", "model.safetensors", "base.safetensors", "optimizer.safetensors"}
    assert set(os.listdir(entry.path)) == {records.NAME, *named}
    assert records.read(entry.path) == entry.record
    assert {file.name: file.size for file in entry.record.files} == {
        n: (entry.path / n).stat().st_size for n in named
    }
    record = entry.record
    assert (record.step, record.kind, record.reason, record.exact, record.missing) == (
        7,
        Kind.JIT,
        "SIGTERM",
        True,
        (),
    )
    assert (record.run, record.incarnation, record.sequence, record.metrics) == ("r", 1, 1, {"loss": 0.5})
    assert record.written == record.size
    assert json.loads((entry.path / "state.json").read_bytes()) == {"value": {"lr": [0.1]}}
    assert os.listdir(world.catalog.staging) == []


def test_the_files_open_as_plain_safetensors(world: World, state: State) -> None:
    entry = world.save(state, 1)
    path = entry.path / "optimizer.safetensors"
    stored = header_of(path)["m"]
    assert path.read_bytes()[stored.begin : stored.end] == content(state.tensors["optimizer"]["m"])


def test_sequence_numbers_go_on_where_the_last_incarnation_ended(world: World, state: State) -> None:
    assert world.save(state, 5).record.sequence == 1
    assert world.save(state, 3).record.sequence == 2
    world.engine.close()
    world.catalog.close()
    with World(world.catalog.root) as again:
        assert again.save(state, 4).record.sequence == 3
        assert [entry.record.step for entry in again.catalog.entries()] == [4, 3, 5]


def test_why_a_capture_is_not_exact_stands_in_the_record(world: World, state: State) -> None:
    capture = state.capture(1, exact=False, because="gradients were being accumulated")
    record = world.saver.save(capture, saver.Request(Kind.RESCUE, "SIGTERM")).record
    assert (record.exact, record.because) == (False, "gradients were being accumulated")
    assert record.complete


@pytest.mark.parametrize("method", list(Method))
def test_every_method_of_writing_gives_the_same_files(world: World, state: State, method: Method) -> None:
    world.saver.method = method
    entry = world.save(state, 1)
    testing.assert_resumable(world.catalog.root, 1, exact=True)
    assert restored_inside(world) == state.contents()
    assert entry.record.complete


def restored_inside(world: World) -> dict[str, object]:
    found = State()
    assert world.restore(found) is not None
    return found.contents()


def test_the_sizes_of_the_files_are_known_beforehand(world: World, state: State) -> None:
    sizes = world.saver.sizes(state.capture(1))
    entry = world.save(state, 1)
    assert sizes == [(entry.path / f"{group.name}.safetensors").stat().st_size for group in state.groups]


def test_the_budget_learns_from_a_save(world: World, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(world.budget, "observe", lambda nbytes, seconds: seen.append(nbytes))
    entry = world.save(state, 1)
    assert seen == [entry.record.written]


def test_the_sentinel_is_there_while_it_is_built_and_only_then(tmp_path: Path, state: State) -> None:
    made: list[str] = []

    class Watching(storage.Files):
        def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
            if flags & os.O_CREAT and path.name != records.SENTINEL:
                assert (path.parent / records.SENTINEL).exists(), path
                made.append(path.name)
            return super().open(path, flags, mode)

        def rename(self, old: Path, new: Path) -> None:
            assert (old / records.NAME).exists()
            assert not (old / records.SENTINEL).exists()
            made.append(new.name)
            super().rename(old, new)

    with World(tmp_path / "run", Watching()) as world:
        world.save(state, 1)
    assert made[0] == "state.json"
    assert made[-2:] == [records.NAME, "checkpoint-1"]


# ---- what has not changed ----------------------------------------------------------------------------------


def test_a_frozen_file_that_has_not_changed_is_taken_over(world: World, state: State) -> None:
    first = world.save(state, 1)
    state.step(2)
    second = world.save(state, 2)
    assert inode(first.path, "base.safetensors") == inode(second.path, "base.safetensors")
    assert inode(first.path, "model.safetensors") != inode(second.path, "model.safetensors")
    assert second.record.file("base.safetensors") == first.record.file("base.safetensors")
    base = second.record.file("base.safetensors")
    assert base is not None
    assert second.record.written == second.record.size - base.size
    assert restored_inside(world) == state.contents()


def test_a_frozen_file_that_has_changed_is_written(world: World, state: State) -> None:
    first = world.save(state, 1)
    state.change("base", 77)
    second = world.save(state, 2)
    assert inode(first.path, "base.safetensors") != inode(second.path, "base.safetensors")
    assert restored_inside(world) == state.contents()
    restore.verify(first, world.engine)


def test_pruning_the_old_one_leaves_the_new_one_readable(world: World, state: State) -> None:
    for step in range(1, 6):
        state.step(step)
        world.save(state, step)
        world.catalog.prune(Keep(1))
    assert [entry.record.step for entry in world.catalog.entries()] == [5, 4]
    assert (world.catalog.root / "checkpoint-5" / "base.safetensors").stat().st_nlink == 2
    for entry in world.catalog.entries():
        restore.verify(entry, world.engine)
    assert restored_inside(world) == state.contents()


def test_a_file_that_was_the_same_twice_is_taken_over_the_third_time(world: World) -> None:
    state = State(seed=1, frozen=())
    folders = [world.save(state, step).path for step in (1, 2, 3)]
    inodes = [inode(folder, "base.safetensors") for folder in folders]
    assert inodes[0] != inodes[1] == inodes[2]
    state.change("base", 9)
    changed = world.save(state, 4)
    assert inode(changed.path, "base.safetensors") != inodes[2]
    assert restored_inside(world) == state.contents()


def test_a_frozen_file_that_changes_all_the_time_is_not_compared_each_time(
    world: World, state: State
) -> None:
    for step in (1, 2, 3):
        state.change("base", step)
        world.save(state, step)
    compared: list[str] = []
    real = world.engine.write

    def watch(outputs: Sequence[writer.Output], cancelled: Callable[[], bool] = lambda: False) -> None:
        compared.extend(output.layout.name for output in outputs if output.fd is None)
        real(outputs, cancelled)

    world.engine.write = watch  # type: ignore[method-assign]
    state.change("base", 4)
    world.save(state, 4)
    assert "base.safetensors" not in compared
    assert "model.safetensors" in compared  # which has not changed since


class NoLinks(storage.Files):
    code = errno.EPERM

    def link(self, old: Path, new: Path) -> None:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS])
def test_where_links_are_not_possible_the_file_is_copied(tmp_path: Path, state: State, code: int) -> None:
    files = NoLinks()
    files.code = code
    with World(tmp_path / "run", files) as world:
        first, second = world.save(state, 1), world.save(state, 2)
        assert inode(first.path, "base.safetensors") != inode(second.path, "base.safetensors")
        assert second.record.file("base.safetensors") == first.record.file("base.safetensors")
        restore.verify(second, world.engine)


def test_when_the_previous_one_is_gone_everything_is_written(world: World, state: State) -> None:
    first = world.save(state, 1)
    storage.remove_tree(storage.Files(), first.path)
    second = world.save(state, 2)
    assert second.record.written == second.record.size
    assert restored_inside(world) == state.contents()


def test_a_file_is_not_taken_over_from_what_has_come_in_the_place_of_the_previous_one(
    world: World, state: State
) -> None:
    first = world.save(state, 1)
    with World(world.catalog.root.parent / "other") as other:
        strange = State(seed=2)
        other.save(strange, 1)
        storage.remove_tree(storage.Files(), first.path)
        (other.catalog.root / "checkpoint-1").rename(first.path)
    world.save(state, 2)
    assert restored_inside(world) == state.contents()


def test_what_was_found_unchanged_is_not_read_again_after_training_went_on(
    world: World, state: State
) -> None:
    first = world.save(state, 1)
    state.step(2)
    expected = state.contents()
    capture = state.capture(2)
    same = world.saver.unchanged(capture.groups)
    assert set(same) == {"base"}
    state.change("base", 5)  # training unfreezes it while the checkpoint of step 2 is on its way to the disk
    second = world.saver.save(capture, saver.Request(Kind.PERIODIC, "steps", same=same))
    assert inode(first.path, "base.safetensors") == inode(second.path, "base.safetensors")
    assert restored_inside(world) == expected


def test_what_was_found_unchanged_is_not_read_again_on_a_second_attempt(
    tmp_path: Path, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    with World(tmp_path / "run") as world:
        world.save(state, 1)
    with World(tmp_path / "run", testing.FaultyFiles(testing.Fault("fsync", 2))) as world:
        expected = state.contents()
        capture = state.capture(2)
        same = world.saver.unchanged(capture.groups)
        state.change("base", 5)
        world.saver.save(capture, saver.Request(Kind.PERIODIC, "steps", same=same))
        assert "retrying" in caplog.text
        assert restored_inside(world) == expected


def test_what_was_to_be_taken_over_and_is_gone_is_not_made_up(world: World, state: State) -> None:
    first = world.save(state, 1)
    same = world.saver.unchanged(state.groups)
    storage.remove_tree(storage.Files(), first.path)
    with pytest.raises(errors.SaveError, match=r"base.safetensors was to be linked"):
        world.saver.save(state.capture(2), saver.Request(Kind.PERIODIC, "steps", same=same))
    assert world.catalog.entries() == []
    assert os.listdir(world.catalog.staging) == []


# ---- deadlines ---------------------------------------------------------------------------------------------


class Ticking(testing.FakeClock):
    """Time passes with each chunk that is written."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def now(self) -> float:
        self._now += self._seconds
        return self._now


def chunks_of(state: State, *groups: str) -> int:
    return sum(-(-(sum(SIZES[g].values()) + 4096) // 8192) for g in groups)


def test_when_the_time_runs_out_the_most_wanted_files_are_committed(tmp_path: Path, state: State) -> None:
    clock = Ticking(0.0)
    with World(tmp_path / "run", clock=clock, threads=1) as world:
        clock._seconds = 1.0
        entry = world.save(state, 1, deadline=clock._now + chunks_of(state, "model", "base") + 4)
    assert entry.record.missing == ("optimizer.safetensors",)
    assert not entry.record.exact
    assert not entry.record.complete
    assert entry.record.because == "there was no time to write optimizer.safetensors"
    assert set(os.listdir(entry.path)) == {
        records.NAME,
        "state.json",
        "model.safetensors",
        "base.safetensors",
    }
    testing.assert_resumable(tmp_path / "run", 1, exact=False)


def test_without_the_weights_the_previous_checkpoint_stays(tmp_path: Path, state: State) -> None:
    clock = Ticking(0.0)
    with World(tmp_path / "run", clock=clock, threads=1) as world:
        world.save(state, 1)
        before = state.contents()
        state.step(2)
        state.change("base", 2)
        clock._seconds = 1.0
        with pytest.raises(
            errors.DeadlineError, match="while step 2 was written; the previous checkpoint stays"
        ):
            world.save(state, 2, deadline=clock._now + 3)
        clock._seconds = 0.0
        assert os.listdir(world.catalog.staging) == []
        testing.assert_resumable(tmp_path / "run", 1, exact=True)
        assert restored_inside(world) == before


def test_weights_that_were_taken_over_count_as_saved(tmp_path: Path) -> None:
    state = State(seed=1, frozen=("base", "model"))
    clock = Ticking(0.0)
    with World(tmp_path / "run", clock=clock, threads=1) as world:
        world.save(state, 1)
        state.step(2)
        clock._seconds = 1.0
        entry = world.save(state, 2, deadline=clock._now + 4)
    assert entry.record.missing == ("optimizer.safetensors",)


def test_a_deadline_that_has_passed_commits_nothing(tmp_path: Path, state: State) -> None:
    clock = testing.FakeClock()
    with World(tmp_path / "run", clock=clock) as world:
        with pytest.raises(errors.DeadlineError):
            world.save(state, 1, deadline=clock.now())
        assert world.catalog.entries() == []


def test_a_save_that_nobody_wants_any_more_is_not_committed_in_part(tmp_path: Path, state: State) -> None:
    with World(tmp_path / "run", threads=1) as world:
        looks = iter(range(1000))
        enough = chunks_of(state, "model", "base") + 2
        with pytest.raises(errors.DeadlineError, match="step 1 was abandoned"):
            world.save(state, 1, abandoned=lambda: next(looks) >= enough)
        assert world.catalog.entries() == []


# ---- spare space -------------------------------------------------------------------------------------------


def test_a_spare_becomes_the_new_file(world: World, state: State, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"\xee" * 100_000)
    number = (tmp_path / "old").stat().st_ino
    assert world.catalog.spares.give(tmp_path / "old")
    entry = world.save(state, 1)
    assert number in {inode(entry.path, file.name) for file in entry.record.files}
    assert world.catalog.spares.sizes() == []
    assert restored_inside(world) == state.contents()


def test_the_files_of_a_pruned_checkpoint_are_those_of_the_next(world: World) -> None:
    state = State(seed=1, frozen=())
    for step in (1, 2, 3):
        state.step(step)
        state.change("base", step)
        world.save(state, step)
    old = {file.stat().st_ino for file in (world.catalog.root / "checkpoint-1").glob("*.safetensors")}
    world.catalog.prune(Keep(2))
    state.step(4)
    state.change("base", 4)
    entry = world.save(state, 4)
    assert old == {file.stat().st_ino for file in entry.path.glob("*.safetensors")}
    for each in world.catalog.entries():
        restore.verify(each, world.engine)
    assert restored_inside(world) == state.contents()


def test_a_reader_of_a_pruned_checkpoint_reads_on_undisturbed(world: World) -> None:
    state = State(seed=1, frozen=())
    entry = world.save(state, 1)
    before = (entry.path / "model.safetensors").read_bytes()
    fd = os.open(entry.path / "model.safetensors", os.O_RDONLY)
    os.link(entry.path / "optimizer.safetensors", world.catalog.root / "backup")
    backup = (world.catalog.root / "backup").read_bytes()
    for step in range(2, 7):
        state.step(step)
        state.change("base", step)
        world.save(state, step)
        world.catalog.prune(Keep(1))
    assert os.pread(fd, len(before) + 1, 0) == before
    assert (world.catalog.root / "backup").read_bytes() == backup
    os.close(fd)


def test_a_spare_of_the_wrong_size_leaves_no_trace(world: World, state: State, tmp_path: Path) -> None:
    for number, size in enumerate((5000, 200_000, 26_000)):
        (tmp_path / f"old-{number}").write_bytes(b"\xee" * size)
        assert world.catalog.spares.give(tmp_path / f"old-{number}")
    entry = world.save(state, 1)
    for file in entry.record.files:
        assert (entry.path / file.name).stat().st_size == file.size
    restore.verify(entry, world.engine)


# ---- the rest ----------------------------------------------------------------------------------------------


def test_the_same_step_saved_again_replaces_the_first(world: World, state: State) -> None:
    world.save(state, 1)
    state.step(9)
    entry = world.save(state, 1)
    assert [each.record.sequence for each in world.catalog.entries()] == [2]
    assert world.saver.last == entry
    assert restored_inside(world) == state.contents()


def test_a_layout_follows_the_group_it_was_made_for(world: World, state: State) -> None:
    world.save(state, 1)
    other = State(seed=3)
    world.save(other, 2)
    assert restored_inside(world) == other.contents()
    grown = State(seed=4, sizes={**SIZES, "model": {"w": 50_000, "b": 100, "none": 0}})
    entry = world.save(grown, 3)
    assert header_of(entry.path / "model.safetensors")["w"].shape == (50_000,)


def test_an_interrupted_build_is_cleared_away_by_the_next(world: World, state: State) -> None:
    leftover = world.catalog.staging / "checkpoint-1"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_bytes(b"x")
    entry = world.save(state, 1)
    assert not (entry.path / "junk").exists()


def test_saving_does_not_read_the_state_after_it_returned(world: World, state: State) -> None:
    before = state.contents()
    world.save(state, 1)
    for names in state.tensors.values():
        for live in names.values():
            put(live, bytes(live.nbytes))
    found = State()
    assert world.restore(found) is not None
    assert {**found.contents(), "value": None} == {**before, "value": None}


def test_a_capture_can_be_given_other_groups(state: State) -> None:
    capture = saver.with_groups(state.capture(3), state.groups[:1])
    assert (capture.step, [group.name for group in capture.groups]) == (3, ["model"])
