from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.core.bare_core import State, World, block, content, flip, header_of, noise
from helpers.ranks import states as ranks
from helpers.ranks.states import Live, Whole, grid, rows
from lastcall import errors
from lastcall.core.checkpoint import filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import digest, writer
from lastcall.core.restore import contents, restore
from lastcall.core.subject import Loading, Stored
from lastcall.formats import manifest
from lastcall.types import FileRecord, Region

CHUNK = 8192
SHAPE = (64, 48)
TENSORS = {"w": Whole("F32", SHAPE, rows(SHAPE, 4), 1), "b": Whole("BF16", (7,), rows((7,), 4), 2)}
TENSORS["one"] = Whole("F32", (), (((), ()),), 3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", CHUNK)


@pytest.fixture
def engine() -> Iterator[writer.Engine]:
    made = writer.Engine(2)
    yield made
    made.close()


@pytest.fixture
def entry(tmp_path: Path, engine: writer.Engine) -> Entry:
    """A checkpoint that four ranks wrote."""
    return ranks.write(
        tmp_path / "checkpoint-1", engine, {rank: ranks.state(TENSORS, rank, 4) for rank in range(4)}
    )


def held(boxes: Callable[[tuple[int, ...]], tuple[ranks.Box, ...]]) -> dict[str, Whole]:
    """The same tensors, held otherwise."""
    return {name: dataclasses.replace(whole, boxes=boxes(whole.shape)) for name, whole in TENSORS.items()}


def everywhere(shape: tuple[int, ...]) -> tuple[ranks.Box, ...]:
    return grid(shape, {})


def relist(folder: Path) -> Entry:
    """Make the record fit the files as they are now, as somebody with bad intentions would."""
    found = records.read(folder)
    (folder / records.NAME).write_bytes(
        dataclasses.replace(found, files=tuple(listed(folder / f.name) for f in found.files)).to_json()
    )
    return Entry(folder, records.read(folder))


def listed(path: Path) -> FileRecord:
    data = path.read_bytes()
    chunks = tuple(digest.of(data[begin : begin + CHUNK]) for begin in range(0, len(data), CHUNK))
    return FileRecord(path.name, len(data), digest.over(chunks), CHUNK, chunks)


def load(entry: Entry, engine: writer.Engine, live: Live, size: int, *, verify_first: bool = True) -> Live:
    restore.load(entry, engine, live, verify_first=verify_first, rank=live.rank, size=size)
    return live


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_another_number_of_ranks_loads_it(entry: Entry, engine: writer.Engine, size: int) -> None:
    for rank in range(size):
        boxes = held(lambda shape: rows(shape, size) if shape else everywhere(shape))
        load(entry, engine, Live(boxes, rank), size).check(range(4))


def test_shards_become_replicas_and_columns(entry: Entry, engine: writer.Engine) -> None:
    load(entry, engine, Live(held(everywhere), 3), 4).check(range(4))
    columns = held(lambda shape: rows(shape, 4, len(shape) - 1) if shape else everywhere(shape))
    for rank in range(4):
        load(entry, engine, Live(columns, rank), 4).check(range(4))


def test_a_rank_without_a_document_takes_that_of_rank_0(tmp_path: Path, engine: writer.Engine) -> None:
    tensors = held(everywhere)
    entry = ranks.write(
        tmp_path / "checkpoint-1", engine, {r: ranks.state(tensors, r, 4) for r in range(4)}, writers=[0, 3]
    )
    for rank in range(4):
        load(entry, engine, Live(tensors, rank), 4).check([0, 3])


def test_one_process_that_wrote_alone_is_read_by_many(tmp_path: Path, engine: writer.Engine) -> None:
    with World(tmp_path / "run") as world:
        state = State(seed=1)
        world.save(state, 1)
        entry = world.catalog.entries()[0]
    before = state.contents()["model/w"]
    assert isinstance(before, bytes)
    for rank in range(4):
        some = block(bytes(5000))

        class Quarter(State):
            def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
                loading = super().prepare(document, stored)
                loading.targets["model"]["w"] = Region((5000 * rank,), (5000,), some)  # type: ignore[index] # noqa: B023
                return loading

        restore.load(entry, engine, Quarter(seed=7), verify_first=True, rank=rank, size=4)
        assert content(some) == before[5000 * rank : 5000 * (rank + 1)]


def test_only_the_files_that_a_rank_needs_are_opened(entry: Entry, engine: writer.Engine) -> None:
    for file in entry.record.files:
        if filenames.rank_of(file.name) == 3 and file.name != filenames.document(3):
            os.unlink(entry.path / file.name)
    tensors = {"w": TENSORS["w"]}
    load(entry, engine, Live(tensors, 1), 4).check(range(4))
    with pytest.raises(errors.CheckpointError, match="-00003.safetensors cannot be opened"):
        load(entry, engine, Live(tensors, 3), 4)
    with pytest.raises(errors.CheckpointError, match="-00003.safetensors cannot be opened"):
        load(entry, engine, Live(tensors, 1), 1)


def test_only_the_chunks_that_a_rank_needs_are_read(tmp_path: Path, engine: writer.Engine) -> None:
    whole = {"w": Whole("F32", (1000, 48), grid((1000, 48), {}), 1)}
    entry = ranks.write(tmp_path / "checkpoint-1", engine, {0: ranks.state(whole, 0, 1)})
    read: list[tuple[str, int]] = []
    real = engine.read

    def watched(inputs: list[writer.Input]) -> None:
        read.extend((one.record.name, number) for one in inputs for number in one.numbers)
        real(inputs)

    engine.read = watched  # type: ignore[method-assign, assignment]
    part = {"w": dataclasses.replace(whole["w"], boxes=rows((1000, 48), 10))}
    load(entry, engine, Live(part, 5), 10, verify_first=False).check([0])
    begin = header_of(entry.path / "model-00000.safetensors")["w"].begin
    first, last = (begin + 500 * 192) // CHUNK, (begin + 600 * 192 - 1) // CHUNK
    numbers = {number for name, number in read if name == "model-00000.safetensors"}
    assert numbers >= {0, *range(first, last + 1)}
    assert len(numbers) <= last - first + 3  # the header, and what is the rank's own


def damaged(entry: Entry) -> tuple[Live, Live]:
    """Damage what rank 2 wrote of w: who needs it, and who does not."""
    (key,) = [key for key in header_of(entry.path / "model-00002.safetensors") if key.startswith("w")]
    flip(
        entry.path / "model-00002.safetensors", header_of(entry.path / "model-00002.safetensors")[key].end - 1
    )
    return Live(TENSORS, 2), Live(TENSORS, 1)


def test_damage_is_found_by_the_ranks_that_need_it_before_live_state_changes(
    entry: Entry, engine: writer.Engine
) -> None:
    hurt, fine = damaged(entry)
    with pytest.raises(errors.CheckpointError, match="model-00002.safetensors: the bytes from") as caught:
        load(entry, engine, hurt, 4)
    assert not isinstance(caught.value, restore.PartlyLoaded)
    assert all(content(live) == bytes(live.nbytes) for some in hurt.memory.values() for live in some)
    load(entry, engine, fine, 4).check(range(4))


def test_one_process_finds_damage_anywhere(entry: Entry, engine: writer.Engine) -> None:
    flip(entry.path / "rng-00003.safetensors", -1)
    live = Live(held(everywhere), 0)
    with pytest.raises(errors.CheckpointError, match="rng-00003.safetensors"):
        load(entry, engine, live, 1)
    assert live.document is None
    with pytest.raises(restore.PartlyLoaded, match="rng-00003.safetensors"):
        load(entry, engine, live, 1, verify_first=False)


def test_with_a_way_out_damage_is_found_while_reading(entry: Entry, engine: writer.Engine) -> None:
    hurt, _ = damaged(entry)
    with pytest.raises(restore.PartlyLoaded):
        restore.attempt(entry, engine, hurt, True, 2, 4)


def test_when_another_rank_objects_nothing_live_changes(entry: Entry, engine: writer.Engine) -> None:
    live = Live(TENSORS, 1)

    def object_to_it() -> None:
        raise errors.CheckpointError("rank 2 found damage")

    for has_fallback in (True, False):
        with pytest.raises(errors.CheckpointError, match="rank 2 found damage") as caught:
            restore.attempt(entry, engine, live, has_fallback, 1, 4, object_to_it)
        assert not isinstance(caught.value, restore.PartlyLoaded)
        assert all(content(one) == bytes(one.nbytes) for some in live.memory.values() for one in some)


def test_a_checkpoint_that_does_not_fit_is_no_damage(entry: Entry, engine: writer.Engine) -> None:
    other = {"w": dataclasses.replace(TENSORS["w"], shape=(1, 2), boxes=grid((1, 2), {}))}
    with pytest.raises(errors.MismatchError):
        load(entry, engine, Live(other, 1), 4)


def test_a_header_in_which_a_name_was_damaged_is_damage_and_not_another_model(
    tmp_path: Path, engine: writer.Engine
) -> None:
    with World(tmp_path / "run") as world:
        state = State(seed=1)
        world.save(state, 1)
        state.step(2)
        world.save(state, 2)
        path = world.catalog.root / "checkpoint-2" / "optimizer.safetensors"
        flip(path, path.read_bytes().index(b'"m"') + 1)
        found = world.restore(State())
        assert found is not None and found.record.step == 1


def test_verify_covers_every_file_of_every_rank(entry: Entry, engine: writer.Engine) -> None:
    restore.verify(entry, engine)
    for file in entry.record.files:
        flip(entry.path / file.name, -1)
        with pytest.raises(errors.CheckpointError, match=file.name):
            restore.verify(entry, engine)
        flip(entry.path / file.name, -1)


def test_more_files_than_may_be_open_at_a_time_are_read(
    entry: Entry, engine: writer.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_AT_ONCE", 2)
    load(entry, engine, Live(held(everywhere), 0), 1).check(range(4))
    load(entry, engine, Live(held(everywhere), 2), 4).check(range(4))
    restore.verify(entry, engine)


# ---- hostile manifests: the digests are right, the intentions are not --------------------------------------


def rewritten(entry: Entry, harm: Callable[[dict[str, dict[str, object]]], None]) -> Entry:
    path = entry.path / manifest.NAME
    body = json.loads(path.read_bytes())
    harm(body["tensors"]["model"])
    path.write_text(json.dumps(body))
    return relist(entry.path)


def refused(entry: Entry, engine: writer.Engine) -> str:
    live = Live(held(everywhere), 0)
    with pytest.raises(errors.CheckpointError) as caught:
        load(entry, engine, live, 4)
    assert not isinstance(caught.value, restore.PartlyLoaded)
    assert all(content(one) == bytes(one.nbytes) for some in live.memory.values() for one in some)
    return str(caught.value)


def test_a_manifest_that_points_outside_the_folder_is_refused(entry: Entry, engine: writer.Engine) -> None:
    def harm(tensors: dict[str, dict[str, object]]) -> None:
        tensors["w"]["pieces"][1]["file"] = "../../model-00001.safetensors"  # type: ignore[index]

    assert "not the plain name" in refused(rewritten(entry, harm), engine)


def test_a_manifest_that_names_a_file_unknown_to_the_record_is_refused(
    entry: Entry, engine: writer.Engine
) -> None:
    def harm(tensors: dict[str, dict[str, object]]) -> None:
        tensors["w"]["pieces"][1]["file"] = "evil-00001.safetensors"  # type: ignore[index]

    (entry.path / "evil-00001.safetensors").symlink_to("/dev/zero")
    assert "which the record does not" in refused(rewritten(entry, harm), engine)


@pytest.mark.parametrize(
    ("key", "why"),
    [("nothing", "is not in it"), ("own", "is U8 [100] in it"), ("__metadata__", "is not in it")],
)
def test_a_manifest_that_lies_about_a_piece_is_refused(
    entry: Entry, engine: writer.Engine, key: str, why: str
) -> None:
    def harm(tensors: dict[str, dict[str, object]]) -> None:
        tensors["w"]["pieces"][1]["key"] = key  # type: ignore[index]

    assert why in refused(rewritten(entry, harm), engine)


def test_a_damaged_manifest_is_refused(entry: Entry, engine: writer.Engine) -> None:
    flip(entry.path / manifest.NAME, 20)
    assert "manifest.json does not match its digest" in refused(entry, engine)


def test_a_link_in_the_place_of_a_shard_is_refused(
    entry: Entry, engine: writer.Engine, tmp_path: Path
) -> None:
    path = entry.path / "model-00002.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refused(entry, engine)


def test_a_checkpoint_without_the_document_of_rank_0_is_refused(entry: Entry, engine: writer.Engine) -> None:
    found = records.read(entry.path)
    files = tuple(file for file in found.files if not file.name.startswith("state-"))
    (entry.path / records.NAME).write_bytes(dataclasses.replace(found, files=files).to_json())
    assert "names no state-00000.json" in refused(Entry(entry.path, records.read(entry.path)), engine)


def test_the_contents_say_whose_document_it_is(entry: Entry) -> None:
    assert [contents.Contents(entry, rank).rank for rank in (0, 3, 4)] == [0, 3, 0]


# ---- what a framework reads by itself ----------------------------------------------------------------------


class Own:
    """Reads nothing through us: a framework opens its files when the checks are done."""

    targets: dict[str, dict[str, object]] = {}
    whole = True
    loads_by_itself = True
    saved_step = None

    def __init__(self) -> None:
        self.finished = False

    def prepare(self, document: dict[str, object], stored: Stored) -> Own:
        return self

    def finish(self) -> None:
        self.finished = True


FRAMEWORKS = [f"native/part-{number}.bin" for number in range(7)]


@pytest.fixture
def native(entry: Entry) -> Entry:
    """The checkpoint of four ranks, with files of a framework in a folder of their own."""
    (entry.path / "native").mkdir()
    files = []
    for number, name in enumerate(FRAMEWORKS):
        (entry.path / name).write_bytes(noise(CHUNK * 2 + number, number))
        files.append(dataclasses.replace(listed(entry.path / name), name=name))
    record = dataclasses.replace(entry.record, files=(*entry.record.files, *files))
    (entry.path / records.NAME).write_bytes(record.to_json())
    return Entry(entry.path, records.read(entry.path))


def turned_away(entry: Entry, engine: writer.Engine, rank: int, size: int, verify_first: bool) -> str:
    """Why a rank does not load it; empty if it does. It says so before anybody goes on."""
    loading, went_on = Own(), []
    try:
        restore.load(
            entry,
            engine,
            loading,
            verify_first=verify_first,
            rank=rank,
            size=size,
            ready=lambda: went_on.append(rank),
        )
    except restore.PartlyLoaded:
        raise
    except errors.CheckpointError as error:
        why = str(error)
    else:
        why = ""
    assert loading.finished is bool(went_on) is not bool(why)
    return why


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("verify_first", [True, False])
def test_each_file_is_checked_by_the_rank_whose_share_it_is(
    native: Entry, engine: writer.Engine, size: int, verify_first: bool
) -> None:
    for name in FRAMEWORKS:
        flip(native.path / name, CHUNK + 3)
        found = [
            rank
            for rank in range(size)
            if (why := turned_away(native, engine, rank, size, verify_first)) and name in why
        ]
        position = [file.name for file in native.record.files].index(name)
        assert found == [position % size]
        flip(native.path / name, CHUNK + 3)


def test_a_file_that_is_gone_is_found_by_one_rank_too(native: Entry, engine: writer.Engine) -> None:
    os.unlink(native.path / FRAMEWORKS[2])
    raised = [why for rank in range(4) if (why := turned_away(native, engine, rank, 4, False))]
    assert raised == [f"{FRAMEWORKS[2]} cannot be opened: No such file or directory"]


@pytest.mark.parametrize("verify_first", [True, False])
def test_one_process_checks_them_all_before_the_framework_reads(
    native: Entry, engine: writer.Engine, verify_first: bool
) -> None:
    good = Own()
    restore.load(native, engine, good, verify_first=verify_first)
    assert good.finished
    flip(native.path / FRAMEWORKS[6], -1)
    loading = Own()
    with pytest.raises(errors.CheckpointError, match=FRAMEWORKS[6]):
        restore.load(native, engine, loading, verify_first=verify_first)
    assert not loading.finished
