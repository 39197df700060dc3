"""The order of the commit protocol, and what is there if it ends at any of its operations."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lastcall.core.checkpoint import commit
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import NAME, SENTINEL, Record
from lastcall.storage import files as storage
from lastcall.types import Kind


class Killed(BaseException):
    """The process ends before this operation."""


class Recorder(storage.Files):
    """Notes each operation that changes the disk, and ends before the one of this number."""

    def __init__(self, end: int | None = None, *, swaps: bool = True) -> None:
        self.said: list[str] = []
        self._end = end
        self._swaps = swaps
        self._paths: dict[int, Path] = {}

    def _say(self, what: str, *paths: Path) -> None:
        if len(self.said) == self._end:
            raise Killed
        self.said.append(" ".join([what, *(path.name for path in paths)]))

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def pwrite(self, fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        self._say("write", self._paths[fd])
        return super().pwrite(fd, views, offset, flags)

    def fsync(self, fd: int) -> None:
        self._say("fsync", self._paths[fd])
        super().fsync(fd)

    def mkdir(self, path: Path) -> None:
        self._say("mkdir", path)
        super().mkdir(path)

    def rmdir(self, path: Path) -> None:
        self._say("rmdir", path)
        super().rmdir(path)

    def unlink(self, path: Path) -> None:
        self._say("unlink", path)
        super().unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        self._say("rename", old, new)
        super().rename(old, new)

    def exchange(self, one: Path, other: Path) -> None:
        if not self._swaps:
            raise OSError(errno.EINVAL, "this file system cannot")
        self._say("exchange", one, other)
        super().exchange(one, other)


def record(step: int = 7) -> Record:
    return Record(1, step, Kind.PERIODIC, "test", True, ())


def whole(folder: Path) -> bool:
    """Whether a start would take it for a checkpoint; then it must be one."""
    if os.path.lexists(folder / SENTINEL) or not os.path.lexists(folder / NAME):
        return False
    assert (folder / "weights").read_bytes() == b"w" * 100
    records.read(folder)
    return True


def staged(files: storage.Files, root: Path, name: str = "staged") -> Path:
    commit.stage(files, root / name)
    storage.write_small(files, root / name / "weights", b"w" * 100)
    return root / name


def until_the_end(act: Callable[[Recorder], object], make: Callable[[int | None], Recorder]) -> list[str]:
    """Let `act` end at each of its operations in turn, and at last not at all."""
    act(last := make(None))
    for end in range(len(last.said)):
        with pytest.raises(Killed):
            act(make(end))
    return last.said


def test_sentinel_files_record_sentinel_names_name(tmp_path: Path) -> None:
    files = Recorder()
    folder = staged(files, tmp_path)
    commit.seal(files, folder, record())
    assert commit.publish(files, folder, tmp_path / "checkpoint-7") is None
    assert files.said == [
        "mkdir staged",
        f"write {SENTINEL}",
        f"fsync {SENTINEL}",
        "write weights",
        "fsync weights",
        f"write {NAME}",
        f"fsync {NAME}",
        f"unlink {SENTINEL}",
        "fsync staged",
        "rename staged checkpoint-7",
        f"fsync {tmp_path.name}",
    ]
    assert whole(tmp_path / "checkpoint-7")


def test_a_folder_that_others_stage_into_may_be_there_and_one_of_our_own_may_not(tmp_path: Path) -> None:
    commit.stage(storage.Files(), tmp_path / "one", shared=True)
    commit.stage(storage.Files(), tmp_path / "one", shared=True)
    with pytest.raises(FileExistsError):
        commit.stage(storage.Files(), tmp_path / "one")


def test_what_was_needed_for_building_only_goes_between_the_record_and_the_commit(tmp_path: Path) -> None:
    folder = staged(storage.Files(), tmp_path)
    (folder / "part-0.json").touch()
    files = Recorder()
    commit.seal(files, folder, record(), scaffold=folder.glob("part-*"), durable=False)
    assert files.said[2:] == ["unlink part-0.json", f"unlink {SENTINEL}"] and whole(folder)


def test_without_a_record_a_whole_folder_is_no_checkpoint(tmp_path: Path) -> None:
    folder = staged(storage.Files(), tmp_path)
    commit.seal(storage.Files(), folder, None)
    assert [path.name for path in folder.iterdir()] == ["weights"]


@pytest.mark.parametrize("swaps", [True, False])
def test_in_place_of_another_one_there_is_a_whole_checkpoint_at_any_moment(
    tmp_path: Path, swaps: bool
) -> None:
    name, aside = tmp_path / "checkpoint-7", tmp_path / "checkpoint-7.replaced-0"

    def replace(files: Recorder) -> None:
        plain = storage.Files()
        for left in (tmp_path / "staged", name, aside):
            if left.exists():
                storage.remove_tree(plain, left)
        old = staged(plain, tmp_path)
        commit.seal(plain, old, record())
        commit.publish(plain, old, name)
        new = staged(plain, tmp_path)
        commit.seal(plain, new, record())
        try:
            replaced = commit.publish(files, new, name, aside)
            assert replaced == (new if swaps else aside) and whole(replaced)
        finally:
            assert any(map(whole, (name, aside)))

    said = until_the_end(replace, lambda end: Recorder(end, swaps=swaps))
    assert len(said) == (2 if swaps else 3) and said[-1] == f"fsync {tmp_path.name}"


def test_a_name_is_not_taken_from_a_folder_that_may_not_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "notes").write_text("the user's own")
    with pytest.raises(OSError, match="not empty"):
        commit.publish(storage.Files(), staged(storage.Files(), tmp_path), tmp_path / "checkpoint-7")


def test_a_removal_that_ends_anywhere_leaves_all_of_a_checkpoint_or_none(tmp_path: Path) -> None:
    folder = tmp_path / "staged"

    def withdraw(files: Recorder) -> None:
        plain = storage.Files()
        if folder.exists():
            storage.remove_tree(plain, folder)
        commit.seal(plain, staged(plain, tmp_path), record())
        (folder / "below").mkdir()
        (folder / "below" / "more").touch()
        try:
            commit.withdraw(files, folder)
            assert not folder.exists()
        finally:
            whole(folder)

    said = until_the_end(withdraw, Recorder)
    assert said[:4] == [f"write {SENTINEL}", f"fsync {SENTINEL}", f"unlink {NAME}", "fsync staged"]
    assert said[-2:] == [f"unlink {SENTINEL}", "rmdir staged"]


# ---- in an object store ------------------------------------------------------------------------------------


class Store:
    """What is there, and what was asked of it."""

    def __init__(self) -> None:
        self.there: dict[str, bytes] = {}
        self.said: list[str] = []

    def write(self, name: str, data: bytes) -> None:
        self.there[name] = data
        self.said.append(f"write {name}")

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            del self.there[name]
            self.said.append(f"remove {name}")

    def names(self, prefix: str = "") -> dict[str, int]:
        return {name: len(data) for name, data in self.there.items() if name.startswith(prefix)}


def test_in_an_object_store_the_record_is_the_commit_and_the_first_to_go() -> None:
    place: Any = Store()
    commit.stage_upload(place, "checkpoint-7", "run")
    place.write("checkpoint-7/weights", b"w")
    commit.commit_upload(place, "checkpoint-7", record())
    commit.withdraw_upload(place, "checkpoint-7", "run")
    commit.remove_upload(place, "checkpoint-7")
    assert [word.replace("checkpoint-7/", "") for word in place.said] == [
        f"write {SENTINEL}",
        "write weights",
        f"remove {SENTINEL}",
        f"write {NAME}",
        f"write {SENTINEL}",
        f"remove {NAME}",
        "remove weights",
        f"remove {SENTINEL}",
    ]
