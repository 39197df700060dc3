from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.core.bare_core import State, World, flip, header_of
from lastcall import errors
from lastcall.core.checkpoint import filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import digest, writer
from lastcall.core.restore import restore
from lastcall.types import FileRecord

CHUNK = 8192


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", CHUNK)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path / "run") as made:
        yield made


def history(world: World, *steps: int, frozen: tuple[str, ...] = ("base",)) -> dict[int, dict[str, object]]:
    """Save these steps; what the state was at each."""
    state, seen = State(seed=1, frozen=frozen), {}
    for step in steps:
        state.step(step)
        world.save(state, step)
        seen[step] = state.contents()
    return seen


def rewrite(folder: Path, **changes: object) -> None:
    """Change the record as somebody with bad intentions would: it matches its digest."""
    changed = dataclasses.replace(records.read(folder), **changes)  # type: ignore[arg-type]
    (folder / records.NAME).write_bytes(changed.to_json())


def listed(path: Path, chunk: int = CHUNK) -> FileRecord:
    """The file as it is now, the way a record has it."""
    data = path.read_bytes()
    chunks = tuple(digest.of(data[begin : begin + chunk]) for begin in range(0, len(data), chunk))
    return FileRecord(path.name, len(data), digest.over(chunks), chunk, chunks)


def relist(folder: Path) -> None:
    rewrite(folder, files=tuple(listed(folder / file.name) for file in records.read(folder).files))


def test_an_empty_directory_is_a_fresh_start(world: World) -> None:
    state = State(seed=9)
    assert world.restore(state) is None
    assert state.prepared == 0


def test_the_newest_is_restored_byte_for_byte(world: World) -> None:
    seen = history(world, 1, 2, 3)
    state = State()
    entry = world.restore(state)
    assert entry is not None and entry.record.step == 3
    assert state.contents() == seen[3]


def test_one_of_several_chunk_sized_files_is_restored_past_the_page_cache(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_cached", lambda fd, size: False)
    seen = history(world, 1)
    state = State()
    assert world.restore(state) is not None
    assert state.contents() == seen[1]


def test_a_file_in_the_page_cache_is_read_from_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100_000)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    os.pread(fd, 100_000, 0)
    assert restore._cached(fd, 100_000)
    os.close(fd)


def places(world: World) -> list[tuple[str, int]]:
    entry = world.catalog.entries()[0]
    found = [(records.NAME, 5), (records.NAME, -1)]
    for file in entry.record.files:
        found += [(file.name, begin) for begin in range(0, file.size, CHUNK)] + [(file.name, -1)]
    return found


def test_a_byte_damaged_anywhere_sends_the_run_to_the_older_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    seen = history(world, 1, 2, frozen=())  # files that both share would be damaged in both
    newest = world.catalog.root / "checkpoint-2"
    for name, position in places(world):
        flip(newest / name, position)
        world.catalog.clean()
        state = State()
        entry = world.restore(state)
        assert entry is not None and entry.record.step == 1, f"{name} at {position}"
        assert state.contents() == seen[1]
        aside = next(path for path in world.catalog.root.iterdir() if ".damaged-" in path.name)
        flip(aside / name, position)
        aside.rename(newest)
    assert "set checkpoint-2 aside as checkpoint-2.damaged-0: " in caplog.text
    assert "do not match their digest" in caplog.text
    state = State()
    assert world.restore(state) is not None
    assert state.contents() == seen[2]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "base.safetensors"]
)
def test_the_only_one_damaged_is_a_fresh_start_with_the_live_state_untouched(world: World, name: str) -> None:
    history(world, 1)
    flip(world.catalog.root / "checkpoint-1" / name, -1)
    state = State(seed=5)
    before = state.contents()
    assert world.restore(state) is None
    assert state.contents() == before
    assert (world.catalog.root / "checkpoint-1.damaged-0" / name).exists()


def test_of_several_only_the_last_one_left_is_read_twice(world: World) -> None:
    seen = history(world, 1, 2)
    read: list[int] = []
    real = world.engine.read
    world.engine.read = lambda inputs: (read.append(len(inputs)), real(inputs)) and None  # type: ignore[method-assign]
    assert world.restore(State()) is not None
    assert len(read) == 1
    flip(world.catalog.root / "checkpoint-2" / "optimizer.safetensors", -1)
    state = State()
    assert world.restore(state) is not None
    assert len(read) == 1 + 3
    assert state.contents() == seen[1]


def test_when_all_are_damaged_and_the_state_is_spoiled_the_run_does_not_start(world: World) -> None:
    history(world, 1, 2)
    for step in (1, 2):
        flip(world.catalog.root / f"checkpoint-{step}" / "optimizer.safetensors", -1)
    with pytest.raises(errors.CheckpointError, match="Start the run again to begin from scratch"):
        world.restore(State(seed=5))
    assert len(list(world.catalog.root.glob("*.damaged-*"))) == 2
    assert world.restore(State(seed=5)) is None


def test_a_state_that_was_refused_after_it_was_written_to_counts_as_spoiled(world: World) -> None:
    history(world, 1)
    state = State()

    def refuse() -> None:
        raise errors.CheckpointError("state.json says step -1")

    state.on_finish = refuse
    with pytest.raises(errors.CheckpointError, match="Start the run again"):
        world.restore(state)
    assert (world.catalog.root / "checkpoint-1.damaged-0").is_dir()


def test_a_checkpoint_that_does_not_fit_is_no_damage(world: World) -> None:
    history(world, 1, 2)
    state = State(sizes={"model": {"w": 1}})
    before = state.contents()
    with pytest.raises(errors.MismatchError):
        world.restore(state)
    assert state.contents() == before
    assert {path.name for path in world.catalog.root.iterdir()} == {
        ".lastcall",
        "checkpoint-1",
        "checkpoint-2",
    }


def make_partial(folder: Path) -> None:
    files = tuple(file for file in records.read(folder).files if file.name != "optimizer.safetensors")
    rewrite(folder, files=files, missing=("optimizer.safetensors",), exact=False)


def test_a_partial_one_is_used_only_when_there_is_no_complete_one(world: World) -> None:
    seen = history(world, 1, 2)
    make_partial(world.catalog.root / "checkpoint-2")
    state = State()
    entry = world.restore(state)
    assert entry is not None and entry.record.step == 1
    assert state.contents() == seen[1]


def test_a_partial_one_alone_brings_back_what_it_has(world: World) -> None:
    seen = history(world, 1)
    make_partial(world.catalog.root / "checkpoint-1")
    state = State(seed=5)
    before = state.contents()
    entry = world.restore(state)
    assert entry is not None and not entry.record.complete
    for name, value in state.contents().items():
        assert value == (before if name.startswith("optimizer/") else seen[1])[name]


def test_a_partial_one_serves_when_the_complete_one_turns_out_damaged(world: World) -> None:
    seen = history(world, 1, 2)
    make_partial(world.catalog.root / "checkpoint-1")
    flip(world.catalog.root / "checkpoint-2" / "optimizer.safetensors", -1)
    state = State(seed=5)
    before = state.contents()
    entry = world.restore(state)
    assert entry is not None and entry.record.step == 1
    for name, value in state.contents().items():
        assert value == (before if name.startswith("optimizer/") else seen[1])[name]


def test_a_partial_one_does_not_serve_a_state_that_is_spoiled(world: World) -> None:
    history(world, 1, 2, 3)
    make_partial(world.catalog.root / "checkpoint-1")
    for step in (2, 3):
        flip(world.catalog.root / f"checkpoint-{step}" / "optimizer.safetensors", -1)
    with pytest.raises(errors.CheckpointError, match="Start the run again"):
        world.restore(State(seed=5))
    assert (world.catalog.root / "checkpoint-1").is_dir()


# ---- hostile files: the digests are right, the intentions are not ------------------------------------------


def refused(world: World, harm: Callable[[Path], None]) -> str:
    """Do harm to the only checkpoint; why it was refused. Live state stays as it was."""
    history(world, 1)
    folder = world.catalog.root / "checkpoint-1"
    harm(folder)
    state = State(seed=5)
    before = state.contents()
    with pytest.raises(errors.CheckpointError) as caught:
        restore.load(Entry(folder, records.read(folder)), world.engine, state, verify_first=False)
    assert state.contents() == before
    assert world.restore(state) is None
    assert state.contents() == before
    assert (world.catalog.root / "checkpoint-1.damaged-0").is_dir()
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_data_file_that_is_a_link_is_refused(world: World, tmp_path: Path, name: str) -> None:
    def harm(folder: Path) -> None:
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")

    assert f"{name} cannot be opened" in refused(world, harm)


def test_a_pipe_in_the_place_of_a_data_file_does_not_hang(world: World) -> None:
    def harm(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")

    assert "model.safetensors has 0 bytes" in refused(world, harm)


def test_a_file_that_is_missing_is_refused(world: World) -> None:
    assert "No such file" in refused(world, lambda folder: (folder / "model.safetensors").unlink())


@pytest.mark.parametrize("by", [-1, 1, 4096, -CHUNK])
def test_a_file_of_another_size_is_refused(world: World, by: int) -> None:
    def harm(folder: Path) -> None:
        path = folder / "model.safetensors"
        os.truncate(path, path.stat().st_size + by)

    assert "were recorded" in refused(world, harm)


def edit_header(path: Path, **fields: object) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["w"].update(fields)
    text = json.dumps(header).encode().ljust(length)
    assert len(text) == length
    path.write_bytes(data[:8] + text + data[8 + length :])


@pytest.mark.parametrize(
    "fields",
    [
        {"data_offsets": [0, 1 << 40]},
        {"data_offsets": [-8, 19_992]},
        {"data_offsets": [100, 20_100]},
        {"shape": [1 << 40]},
        {"dtype": "F64"},
        {"dtype": "pickle"},
    ],
    ids=repr,
)
def test_a_header_that_points_outside_or_lies_is_refused(world: World, fields: dict[str, object]) -> None:
    def harm(folder: Path) -> None:
        edit_header(folder / "model.safetensors", **fields)
        relist(folder)

    assert "model.safetensors: tensor 'w'" in refused(world, harm)


@pytest.mark.parametrize("text", [b"[]", b"{", b"null", b"[" * 100_000, b"\xff"])
def test_a_document_that_is_no_object_is_refused(world: World, text: bytes) -> None:
    def harm(folder: Path) -> None:
        (folder / filenames.DOCUMENT).write_bytes(text)
        relist(folder)

    assert filenames.DOCUMENT in refused(world, harm)


def test_a_record_without_a_document_is_refused(world: World) -> None:
    def harm(folder: Path) -> None:
        rewrite(
            folder,
            files=tuple(file for file in records.read(folder).files if file.name != filenames.DOCUMENT),
        )

    assert "names no state.json" in refused(world, harm)


def test_chunks_too_large_for_the_buffers_are_refused(world: World) -> None:
    def harm(folder: Path) -> None:
        files = [listed(folder / file.name, 1 << 30) for file in records.read(folder).files]
        rewrite(folder, files=tuple(files))

    assert "chunks of 1073741824 bytes" in refused(world, harm)


def test_files_that_the_record_does_not_name_are_not_looked_at(world: World, tmp_path: Path) -> None:
    seen = history(world, 1)
    folder = world.catalog.root / "checkpoint-1"
    (folder / "evil.safetensors").write_bytes(b"not even a header")
    (folder / "evil.pkl").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.safetensors")
    state = State()
    assert world.restore(state) is not None
    assert state.contents() == seen[1]


def test_a_checkpoint_of_an_unknown_algorithm_is_set_aside(world: World) -> None:
    history(world, 1)
    folder = world.catalog.root / "checkpoint-1"
    body = json.loads((folder / records.NAME).read_bytes())
    (folder / records.NAME).write_text(json.dumps({**body, "algorithm": "crc32"}))
    (said,) = world.catalog.clean()
    assert "'crc32' cannot be checked here" in said


def test_a_checkpoint_of_a_machine_without_xxhash_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    blake = digest.named("blake2b-128")
    with monkeypatch.context() as patch:
        patch.setattr(digest, "of", blake)
        patch.setattr(digest, "ALGORITHM", "blake2b-128")
        patch.setattr(digest, "over", lambda chunks, function=blake: function("".join(chunks).encode()))
        seen = history(world, 1)
        name = world.catalog.root / "checkpoint-1" / records.NAME
        body = {**json.loads(name.read_bytes()), "algorithm": "blake2b-128"}
        del body["digest"]
        name.write_text(json.dumps({**body, "digest": blake(json.dumps(body, sort_keys=True).encode())}))
    state = State()
    assert world.restore(state) is not None
    assert state.contents() == seen[1]


# ---- verify ------------------------------------------------------------------------------------------------


def test_verify_reads_every_byte_and_changes_nothing(world: World) -> None:
    history(world, 1)
    entry = world.catalog.entries()[0]
    restore.verify(entry, world.engine)
    stored = header_of(entry.path / "optimizer.safetensors")
    flip(entry.path / "optimizer.safetensors", stored["v"].end - 1)
    with pytest.raises(errors.CheckpointError, match="optimizer.safetensors: the bytes from"):
        restore.verify(entry, world.engine)
    assert entry.path.is_dir()


def test_the_log_says_which_were_set_aside_and_why(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lastcall")
    history(world, 1, 2, 3)
    os.unlink(world.catalog.root / "checkpoint-3" / "model.safetensors")
    os.truncate(world.catalog.root / "checkpoint-2" / "state.json", 0)
    assert world.restore(State()) is not None
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        "set checkpoint-3 aside as checkpoint-3.damaged-0: model.safetensors cannot be opened: No such file "
        "or directory"
    )
    assert lines[1].startswith("set checkpoint-2 aside as checkpoint-2.damaged-0: state.json has 0 bytes")
