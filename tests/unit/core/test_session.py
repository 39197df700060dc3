"""What of a capture a rank writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.ranks.sessions import CLOCK, Crew
from lastcall import memory
from lastcall.core import session as sessions
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.joint.save import JointSave
from lastcall.storage.files import Files
from lastcall.types import Capture, Extent, File, FileLayout


def file(name: str, *, shared: bool) -> File:
    return File(FileLayout(name, 1, (Extent(0, memory.BytesSource(b"x")),)), shared)


def save(root: Path, rank: int, size: int) -> JointSave:
    return JointSave(Catalog(root, Files(), rank), None, None, SimpleNamespace(rank=rank, size=size), CLOCK)  # type: ignore[arg-type]


def names(root: Path, rank: int, size: int, writers: tuple[int, ...] | None = None) -> list[str]:
    files = file("weights", shared=True), file(f"rng-{rank}", shared=False), file("state", shared=True)
    capture = Capture(5, {"a": 1}, (), metrics={"loss": 1.0}, files=files)
    mine = save(root, rank, size).portion(capture, writers)
    assert (mine.step, mine.document, mine.metrics) == (5, {"a": 1}, {"loss": 1.0})
    return [file.layout.name for file in mine.files]


def test_one_process_writes_all(tmp_path: Path) -> None:
    assert names(tmp_path, 0, 1) == ["weights", "rng-0", "state"]


def test_the_first_of_many_writes_what_they_share(tmp_path: Path) -> None:
    assert [names(tmp_path, rank, 3) for rank in range(3)] == [
        ["weights", "rng-0", "state"],
        ["rng-1"],
        ["rng-2"],
    ]


@pytest.mark.parametrize("writers", [(1, 2), (2, 1)])
def test_where_the_first_is_gone_the_lowest_that_writes_does(
    tmp_path: Path, writers: tuple[int, ...]
) -> None:
    assert [names(tmp_path, rank, 3, writers) for rank in (1, 2)] == [
        ["weights", "rng-1", "state"],
        ["rng-2"],
    ]
    assert names(tmp_path, 2, 3, (2,)) == ["weights", "rng-2", "state"]


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_committed_after_the_identity_was_lost_is_the_newest_all_the_same(
    tmp_path: Path, size: int
) -> None:
    for steps in (3, 5):
        assert Crew(tmp_path, size).train(steps) == [steps] * size
    (tmp_path / ".lastcall" / "run.json").unlink()
    assert Crew(tmp_path, size).train(7) == [7] * size
    last = Crew(tmp_path, size)
    assert last.train(8) == [8] * size
    assert [subject.resumed for subject in last.subjects] == [
        {"rank": rank, "step": 7} for rank in range(size)
    ]
    assert [entry.record.incarnation for entry in last.contexts[0].catalog.entries()][:2] == [4, 3]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("part", ["Warmup", "Agent"])
def test_a_session_that_cannot_be_built_gives_the_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, size: int
) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(sessions, part, fails)
        crew = Crew(tmp_path, size)
        assert [str(raised) for raised in crew.train(3)] == ["can't start new thread"] * size
        assert not any(context.catalog.held for context in crew.contexts)
    assert Crew(tmp_path, size).train(3) == [3] * size
