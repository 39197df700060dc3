from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.core.bare_core import State, block, content, noise, put
from lastcall import memory
from lastcall.core.engine import snapshot, writer
from lastcall.types import Capture, Extent, File, FileLayout, Group, TensorEntry


@pytest.fixture
def engine() -> Iterator[writer.Engine]:
    made = writer.Engine(2)
    yield made
    made.close()


def held(capture: Capture) -> dict[str, bytes]:
    found = {}
    for group in capture.groups:
        for entry in group.entries:
            room = block(bytes(entry.source.nbytes))
            entry.source.read_into(room.address, 0, room.nbytes)
            found[f"{group.name}/{entry.name}"] = content(room)
    return found


def test_a_staged_copy_does_not_follow_later_changes(engine: writer.Engine) -> None:
    state = State(seed=1)
    arena = snapshot.Arena()
    live = state.capture(5, metrics={"loss": 1.0}, exact=False, because="why")
    before = held(live)
    staged = arena.stage(live, engine)
    assert staged is not None
    state.step(99)
    assert held(live) != before
    assert held(staged) == before
    assert (staged.step, staged.metrics, staged.exact, staged.because) == (5, {"loss": 1.0}, False, "why")
    assert [(g.name, g.frozen, g.rank) for g in staged.groups] == [
        (g.name, g.frozen, g.rank) for g in live.groups
    ]


@pytest.mark.parametrize("piece", [64, 1000, 1 << 20])
def test_tensors_are_whole_in_pieces_and_in_bundles(
    engine: writer.Engine, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(snapshot, "_PIECE", piece)
    state = State(seed=1, sizes={"a": {"x": 5000, "y": 0, "z": 1}, "b": {f"t{n}": n for n in range(100)}})
    staged = snapshot.Arena().stage(state.capture(1), engine)
    assert staged is not None
    assert held(staged) == held(state.capture(1))


class Counting(memory.HostMemory):
    __slots__ = ("reads",)

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        self.reads = getattr(self, "reads", 0) + 1
        super().read_into(address, offset, nbytes)


def test_a_source_that_several_tensors_share_is_copied_once(engine: writer.Engine) -> None:
    live = block(noise(1000, 1))
    source = Counting(live.address, live.nbytes, live)
    entries = tuple(TensorEntry(name, "U8", (1000,), source) for name in ("tied", "embedding"))
    staged = snapshot.Arena().stage(
        Capture(1, {}, (Group("a", entries[:1]), Group("b", entries[1:]))), engine
    )
    assert staged is not None
    assert source.reads == 1
    assert set(held(staged).values()) == {noise(1000, 1)}
    one, other = (group.entries[0].source for group in staged.groups)
    assert isinstance(one, memory.HostMemory) and isinstance(other, memory.HostMemory)
    assert one.address == other.address


def test_the_memory_is_kept_and_used_again(engine: writer.Engine) -> None:
    made: list[int] = []

    def allocate(nbytes: int) -> memory.Buffer:
        made.append(nbytes)
        return memory.PageBuffer(nbytes)

    arena = snapshot.Arena(allocate)
    state = State(seed=1)
    assert arena.reserve(state.capture(1).nbytes + 10_000)
    for number in range(3):
        state.step(number)
        staged = arena.stage(state.capture(number), engine)
        assert staged is not None
        assert held(staged) == held(state.capture(number))
    assert len(made) == 1


def test_an_arena_grows_when_the_state_does(engine: writer.Engine) -> None:
    arena = snapshot.Arena()
    assert arena.stage(State(seed=1, sizes={"a": {"x": 10}}).capture(1), engine) is not None
    large = State(seed=1)
    staged = arena.stage(large.capture(2), engine)
    assert staged is not None
    assert held(staged) == held(large.capture(2))


def test_a_state_without_tensors_is_staged_too(engine: writer.Engine) -> None:
    staged = snapshot.Arena().stage(Capture(1, {"n": 1}, ()), engine)
    assert staged == Capture(1, {"n": 1}, ())


def test_memory_that_is_not_there_is_not_asked_for(
    engine: writer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> memory.Buffer:
        raise AssertionError("asked for")

    monkeypatch.setattr(snapshot, "available_memory", lambda: 1000)
    arena = snapshot.Arena(refuse)
    assert not arena.reserve(801)
    assert arena.stage(State(seed=1).capture(1), engine) is None


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "no"), RuntimeError("CUDA error")])
def test_an_allocation_that_fails_is_a_no_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(snapshot, "available_memory", lambda: None)
    failures = [error]

    def allocate(nbytes: int) -> memory.Buffer:
        if failures:
            raise failures.pop()
        return memory.PageBuffer(nbytes)

    arena = snapshot.Arena(allocate)
    assert not arena.reserve(1000)
    assert arena.reserve(1000)


def test_an_error_of_a_source_reaches_the_caller(engine: writer.Engine) -> None:
    class Broken(memory.HostMemory):
        def read_into(self, address: int, offset: int, nbytes: int) -> None:
            raise RuntimeError("the device is gone")

    live = block(b"x")
    entries = (TensorEntry("x", "U8", (1,), Broken(live.address, 1, live)),)
    with pytest.raises(RuntimeError, match="the device is gone"):
        snapshot.Arena().stage(Capture(1, {}, (Group("a", entries),)), engine)


def test_this_machine_says_how_much_memory_it_has() -> None:
    available = snapshot.available_memory()
    assert available is not None
    assert available > 1_000_000


def group(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_the_limit_of_a_container_counts_and_so_do_those_around_it(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/\n0::/pod/container\n")
    root = tmp_path / "cgroup"
    group(root / "pod" / "container", "max", 10, 0)
    group(root / "pod", "1000", 700, 50)
    group(root, "max", 0, 0)
    assert snapshot._left_in_groups(root, own) == [350]
    group(root / "pod" / "container", "600", 700, 50)
    assert snapshot._left_in_groups(root, own) == [0, 350]


def test_where_no_control_group_says_anything_nothing_is_limited(tmp_path: Path) -> None:
    assert snapshot._left_in_groups(tmp_path / "none", tmp_path / "nothing") == []


def test_an_old_control_group_counts_too(tmp_path: Path) -> None:
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old / "memory.usage_in_bytes").write_text("100\n")
    (old / "memory.stat").write_text("total_inactive_file 20\n")
    assert snapshot._left_in_groups(tmp_path, tmp_path / "nothing") == [420]


def test_groups_are_left_out_by_name() -> None:
    groups = State(seed=1).groups
    assert [g.name for g in snapshot.without(groups, {"base", "other"})] == ["model", "optimizer"]


# ---- files of a framework ----------------------------------------------------------------------------------


def in_files(capture: Capture) -> list[tuple[str, bool, list[tuple[int, bytes]]]]:
    found = []
    for file in capture.files:
        extents = []
        for extent in file.layout.extents:
            room = block(bytes(extent.source.nbytes))
            extent.source.read_into(room.address, 0, room.nbytes)
            extents.append((extent.offset, content(room)))
        found.append((file.layout.name, file.shared, extents))
    return found


def test_the_files_of_a_framework_are_copied_and_what_cannot_change_is_kept_as_it_is(
    engine: writer.Engine,
) -> None:
    live, header = block(noise(5000, 1)), memory.BytesSource(b"header")
    files = (
        File(FileLayout("a/model.bin", 5006, (Extent(0, header), Extent(6, live))), shared=True),
        File(FileLayout("empty", 0, ())),
    )
    capture = Capture(3, {}, (), files=files)
    before = in_files(capture)
    staged = snapshot.Arena().stage(capture, engine)
    assert staged is not None
    put(live, noise(5000, 2))
    assert in_files(capture) != before
    assert in_files(staged) == before
    kept, copied = staged.files[0].layout.extents
    assert kept.source is header and copied.source is not live
    assert [file.layout.size for file in staged.files] == [5006, 0]
    assert capture.files == files  # and the capture itself is untouched


def test_a_tensor_that_is_in_a_group_and_in_a_file_is_copied_once(engine: writer.Engine) -> None:
    live = block(noise(1000, 1))
    source = Counting(live.address, live.nbytes, live)
    groups = (Group("a", (TensorEntry("w", "U8", (1000,), source),)),)
    staged = snapshot.Arena().stage(
        Capture(1, {}, groups, files=(File(FileLayout("w.bin", 1000, (Extent(0, source),))),)), engine
    )
    assert staged is not None
    assert source.reads == 1
    assert staged.files[0].layout.extents[0].source.nbytes == 1000
    assert held(staged)["a/w"] == in_files(staged)[0][2][0][1] == noise(1000, 1)


def test_files_that_there_is_no_room_for_are_not_copied(engine: writer.Engine) -> None:
    def refuse(nbytes: int) -> memory.Buffer:
        raise MemoryError

    capture = Capture(1, {}, (), files=(File(FileLayout("w.bin", 9, (Extent(0, block(b"x" * 9)),))),))
    assert snapshot.Arena(refuse).stage(capture, engine) is None
