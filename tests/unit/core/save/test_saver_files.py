"""Checkpoints in a framework's own format: files that an adapter has laid out, some of them in folders."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helpers.core.bare_core import State, World, block, flip, noise, put
from lastcall import errors, memory, testing
from lastcall.core.checkpoint import record as records
from lastcall.core.engine import digest
from lastcall.core.restore import restore
from lastcall.core.save import saver
from lastcall.testing import FakeClock, Fault, FaultyFiles
from lastcall.types import Capture, Extent, File, FileLayout, Kind

pytestmark = pytest.mark.usefixtures("small")

REQUEST = saver.Request(Kind.JIT, "SIGTERM")
NAMES = ("model.bin", "small.json", "sub/one.bin", "sub/deeper/two.bin", "empty/none.bin")


def capture(step: int = 1, *, tensors: tuple[memory.HostMemory, ...] = ()) -> Capture:
    """Files of several kinds: a header and a tensor, text, some in folders, one without a byte."""
    model = tensors[0] if tensors else block(noise(20_000, step))
    layouts = [FileLayout("model.bin", 20_005, (Extent(0, memory.BytesSource(b"head\n")), Extent(5, model)))]
    layouts.append(FileLayout("small.json", 2, (Extent(0, memory.BytesSource(b"{}")),)))
    layouts.append(FileLayout("sub/one.bin", 9000, (Extent(0, block(noise(9000, f"one {step}"))),)))
    layouts.append(FileLayout("sub/deeper/two.bin", 3, (Extent(0, memory.BytesSource(b"two")),)))
    layouts.append(FileLayout("empty/none.bin", 0, ()))
    return Capture(step, {"value": step}, (), files=tuple(File(layout) for layout in layouts))


def expected(step: int) -> dict[str, bytes]:
    return {
        "model.bin": b"head\n" + noise(20_000, step),
        "small.json": b"{}",
        "sub/one.bin": noise(9000, f"one {step}"),
        "sub/deeper/two.bin": b"two",
        "empty/none.bin": b"",
    }


def test_files_are_laid_down_digested_and_committed(world: World) -> None:
    entry = world.saver.save(capture(7), REQUEST)
    assert {name: (entry.path / name).read_bytes() for name in NAMES} == expected(7)
    found = {str(path.relative_to(entry.path)) for path in entry.path.rglob("*") if path.is_file()}
    assert found == {*NAMES, "state.json", records.NAME}
    assert records.read(entry.path) == entry.record and entry.record.complete and entry.record.exact
    for name, data in expected(7).items():
        file = entry.record.file(name)
        assert file is not None and file.size == len(data)
        assert file.chunks == tuple(
            digest.of(data[begin : begin + file.chunk]) for begin in range(0, len(data), file.chunk)
        )
    assert entry.record.written == entry.record.size == capture(7).nbytes + len(b'{"value": 7}')
    restore.verify(entry, world.engine)
    testing.assert_resumable(world.catalog.root, 7, exact=True)


def test_a_name_that_no_record_may_have_is_refused_before_anything_is_committed(world: World) -> None:
    before = world.saver.save(capture(7), REQUEST)
    odd = File(FileLayout("my:adapter/model.bin", 2, (Extent(0, memory.BytesSource(b"{}")),)))
    with pytest.raises(errors.SaveError, match="'my:adapter/model.bin'"):
        world.saver.save(Capture(8, {}, (), files=(odd,)), REQUEST)
    assert [entry.path for entry in world.catalog.entries()] == [before.path]


def test_groups_and_files_stand_side_by_side(world: World) -> None:
    state = State(seed=1)
    both = Capture(1, {"value": None}, state.groups, files=capture(1).files)
    entry = world.saver.save(both, REQUEST)
    assert {file.name for file in entry.record.files} == {
        "state.json", "model.safetensors", "base.safetensors", "optimizer.safetensors", *NAMES,
    }  # fmt: skip
    assert sorted(world.saver.sizes(both)) == sorted(
        file.size for file in entry.record.files if file.name != "state.json"
    )
    fresh = State()
    assert world.restore(fresh) is not None
    assert fresh.contents() == state.contents()


@pytest.mark.parametrize("name", ["model.bin", "sub/one.bin", "sub/deeper/two.bin"])
def test_one_damaged_byte_in_any_of_them_is_found(world: World, name: str) -> None:
    entry = world.saver.save(capture(), REQUEST)
    flip(entry.path / name, -1)
    with pytest.raises(errors.CheckpointError, match=name):
        restore.verify(entry, world.engine)


def test_a_folder_that_is_gone_is_found(world: World) -> None:
    entry = world.saver.save(capture(), REQUEST)
    os.unlink(entry.path / "sub" / "deeper" / "two.bin")
    os.rmdir(entry.path / "sub" / "deeper")
    with pytest.raises(errors.CheckpointError, match="sub/deeper/two.bin cannot be opened"):
        restore.verify(entry, world.engine)


def test_saving_a_step_again_replaces_all_of_it(world: World) -> None:
    live = block(noise(20_000, 1))
    first = world.saver.save(capture(1, tensors=(live,)), REQUEST)
    put(live, noise(20_000, 99))
    second = world.saver.save(capture(1, tensors=(live,)), REQUEST)
    assert second.path == first.path and second.record.sequence == first.record.sequence + 1
    assert (second.path / "model.bin").read_bytes() == b"head\n" + noise(20_000, 99)
    assert [entry.record.sequence for entry in world.catalog.entries()] == [2]
    assert os.listdir(world.catalog.staging) == []


class Slow(memory.HostMemory):
    """Takes its time to be read."""

    __slots__ = ("clock",)
    clock: FakeClock

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        self.clock.advance(60.0)
        super().read_into(address, offset, nbytes)


def slow(clock: FakeClock) -> Slow:
    live = block(noise(20_000, 1))
    made = Slow(live.address, live.nbytes, live)
    made.clock = clock
    return made


@pytest.mark.parametrize("kind", [Kind.JIT, Kind.RESCUE])
@pytest.mark.parametrize("with_groups", [False, True])
def test_where_the_time_runs_out_nothing_is_committed(tmp_path: Path, kind: Kind, with_groups: bool) -> None:
    """Partial checkpoints are for our own format: a framework would load what is there, and not know what is
    missing."""
    clock = FakeClock()
    with World(tmp_path / "run", clock=clock, threads=1) as world:
        before = world.saver.save(capture(1), REQUEST)
        late = capture(2, tensors=(slow(clock),))
        if with_groups:
            late = Capture(2, {}, State(seed=1).groups, files=late.files)
        with pytest.raises(errors.DeadlineError, match="step 2"):
            world.saver.save(late, saver.Request(kind, "SIGTERM", deadline=clock.now() + 30.0))
        assert [entry.record.step for entry in world.catalog.entries()] == [1]
        assert os.listdir(world.catalog.staging) == []
        assert not (world.catalog.root / "checkpoint-2").exists()
        restore.verify(before, world.engine)
        assert world.saver.save(capture(2), REQUEST).record.complete  # and the next one is whole


def test_an_abandoned_save_commits_nothing(world: World) -> None:
    with pytest.raises(errors.DeadlineError, match="abandoned"):
        world.saver.save(capture(), saver.Request(Kind.PERIODIC, "x", abandoned=lambda: True))
    assert world.catalog.entries() == [] and os.listdir(world.catalog.staging) == []


@pytest.mark.parametrize(
    ("operation", "number"), [("mkdir", 3), ("mkdir", 4), ("fsync", 2), ("fsync", 4), ("open", 4)]
)
def test_after_one_failure_it_is_tried_again_from_the_start(
    tmp_path: Path, operation: str, number: int
) -> None:
    files = FaultyFiles(Fault(operation, number, errno.EIO))
    with World(tmp_path / "run", files=files) as world:
        entry = world.saver.save(capture(3), REQUEST)
        assert {name: (entry.path / name).read_bytes() for name in NAMES} == expected(3)
        restore.verify(entry, world.engine)


def test_a_rank_of_many_lays_its_files_down_too_and_again_where_folders_are_left(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "staged"
    folder.mkdir()
    (folder / "sub").mkdir()  # left by an attempt that failed, or made by another rank
    laid = world.saver.for_rank(1).lay(folder, capture(2), REQUEST)
    assert {file.name for file in laid.files} == {*NAMES, "state-00001.json"}
    assert {name: (folder / name).read_bytes() for name in NAMES} == expected(2)
    assert (laid.missing, laid.because) == ((), "")
