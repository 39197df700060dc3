"""Checkpoints without a notice, of one process and of several ranks."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.core.bare_core import header_of, noise
from helpers.ranks.sessions import NBYTES, Crew, Subject, periodic
from helpers.ranks.thread_ranks import PATIENCE
from lastcall import memory, testing
from lastcall.core import session as sessions
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.context import RunContext
from lastcall.core.engine.snapshot import Arena
from lastcall.core.notice.inbox import Inbox
from lastcall.core.process import exits
from lastcall.core.session import Session
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage import files as storage
from lastcall.testing import Fault, FaultyFiles
from lastcall.types import Capture, Extent, File, FileLayout, Kind


@pytest.fixture(autouse=True)
def _nobody_leaves_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "leave", lambda code: None)


def every(steps: int, **more: Any) -> PeriodicCheckpointConfig:
    return PeriodicCheckpointConfig(save_strategy="steps", save_steps=steps, **more, environ={})  # type: ignore[arg-type]


def found(root: Path) -> list[tuple[int, Kind, int]]:
    return [
        (entry.record.step, entry.record.kind, entry.record.world)
        for entry in Catalog(root, storage.Files()).entries()
    ]


def test_all_ranks_save_every_few_steps(tmp_path: Path) -> None:
    assert Crew(tmp_path, 2, periodic=every(2)).train(5) == [5, 5]
    assert found(tmp_path) == [(5, Kind.FINAL, 2), (4, Kind.PERIODIC, 2), (2, Kind.PERIODIC, 2)]


def test_the_ranks_do_what_rank_0_has_found_to_be_better(tmp_path: Path) -> None:
    crew = Crew(tmp_path, 2, periodic=every(1, monitor="loss", save_best_only=True))
    losses = [9.0, 3.0, 7.0, 1.0, 5.0]
    crew.subjects[0].numbers = lambda: {"loss": losses[crew.subjects[0].step - 1]}  # type: ignore[method-assign]
    crew.subjects[1].numbers = lambda: {"loss": -crew.subjects[1].step}  # type: ignore[method-assign]  # would find each one better
    assert crew.train(5) == [5, 5]
    assert [step for step, kind, _ in found(tmp_path) if kind is Kind.PERIODIC] == [4, 2, 1]


def test_a_periodic_save_that_fails_on_one_rank_is_none_on_all_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles(*(Fault("fsync", number, errno.EIO) for number in (1, 2, 3)))
    assert Crew(tmp_path, 2, periodic=every(2), files={1: files}).train(5) == [5, 5]
    assert found(tmp_path) == [(5, Kind.FINAL, 2), (4, Kind.PERIODIC, 2)]
    assert caplog.text.count("Periodic checkpoint of step 2 was not saved: ") == 2
    testing.assert_resumable(tmp_path, step=5, exact=True)


def test_rotation_is_rank_0s_business(tmp_path: Path) -> None:
    Crew(tmp_path, 2, periodic=every(1, save_total_limit=2)).train(6)
    assert [step for step, _, _ in found(tmp_path)] == [6, 5]


# ---- saves that somebody asks for --------------------------------------------------------------------------


class Held(storage.Files):
    """A disk that holds every fsync up until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def fsync(self, fd: int) -> None:
        assert self.go.wait(PATIENCE)
        super().fsync(fd)


Start = Callable[..., Session]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a session of one process that saves by itself only when asked to."""
    made: list[Session] = []

    def make(saves: PeriodicCheckpointConfig | None = None, **more: Any) -> Session:
        jit = JITCheckpointConfig(spare=False, huge_pages=False, threads=1, environ={})
        subject = Subject(0, 1)
        context = RunContext.create(
            tmp_path, subject, jit, saves or PeriodicCheckpointConfig(environ={}), **more
        )
        subject.gate = context.gate
        session = sessions.begin(context, Inbox.of_run(context))
        made.append(session)
        return session

    yield make
    for session in made:
        session.stop()


def train(session: Session, steps: int) -> None:
    for _ in range(steps):
        session.context.subject.mutate()  # type: ignore[attr-defined]
        session.at_boundary()


def weights(root: Path, step: int) -> bytes:
    path = root / f"checkpoint-{step}" / "model.safetensors"
    there = header_of(path)["w"]
    return path.read_bytes()[there.begin : there.end]


def test_begin_stops_training_for_the_copy_only_and_what_is_written_is_of_that_step(
    tmp_path: Path, start: Start
) -> None:
    files = Held()
    session = start(files=files)
    background = periodic(session)
    train(session, 2)
    assert not background.busy
    files.go.clear()
    background.begin("somebody asked")
    train(session, 3)
    assert background.busy and found(tmp_path) == []
    files.go.set()
    background.wait()
    assert not background.busy
    (entry,) = session.context.catalog.entries()
    assert (entry.record.step, entry.record.kind, entry.record.reason) == (2, Kind.PERIODIC, "somebody asked")
    assert weights(tmp_path, 2) == noise(NBYTES, 2) and session._checkpointer._committed == (2, 0)


def test_begin_waits_for_the_one_before(tmp_path: Path, start: Start) -> None:
    files = Held()
    session = start(files=files)
    train(session, 1)
    files.go.clear()
    periodic(session).begin("one")
    train(session, 1)
    second = threading.Thread(target=periodic(session).begin, args=("two",))
    second.start()
    second.join(0.2)
    assert second.is_alive() and found(tmp_path) == []
    files.go.set()
    second.join(PATIENCE)
    periodic(session).wait()
    assert [step for step, _, _ in found(tmp_path)] == [2, 1]
    assert (weights(tmp_path, 1), weights(tmp_path, 2)) == (noise(NBYTES, 1), noise(NBYTES, 2))


def test_without_memory_for_a_copy_training_waits(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> memory.Buffer:
        raise MemoryError

    session = start()
    periodic(session)._arena = Arena(refuse)
    train(session, 1)
    with caplog.at_level(logging.WARNING, "lastcall"):
        periodic(session).begin("asked")
    assert not periodic(session).busy
    assert found(tmp_path) == [(1, Kind.PERIODIC, 1)]
    assert "training waits until this periodic checkpoint is written" in caplog.text


def test_one_that_fails_is_said_and_the_next_is_tried(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    session = start(files=FaultyFiles(*(Fault("fsync", number, errno.EIO) for number in (1, 2, 3))))
    train(session, 1)
    periodic(session).begin("asked")
    periodic(session).wait()
    assert found(tmp_path) == [] and session._checkpointer._committed is None
    assert "Periodic checkpoint of step 1 was not saved: " in caplog.text
    train(session, 1)
    periodic(session).begin("asked")
    periodic(session).wait()
    assert found(tmp_path) == [(2, Kind.PERIODIC, 1)]


def test_a_save_that_was_owed_is_done_by_one_that_is_asked_for(tmp_path: Path, start: Start) -> None:
    session = start(every(100))
    train(session, 1)
    periodic(session).owe()
    periodic(session).begin("asked")
    assert not periodic(session).owed
    periodic(session).wait()
    session.at_boundary()
    periodic(session).wait()
    assert found(tmp_path) == [(1, Kind.PERIODIC, 1)]


@pytest.mark.parametrize(
    ("strategy", "told", "reserved"),
    [("no", None, False), ("steps", None, True), ("epoch", None, True), ("no", True, True)],
)
def test_memory_is_kept_where_copies_will_be_wanted(
    start: Start, strategy: str, told: bool | None, reserved: bool
) -> None:
    sizes: list[int] = []

    def allocate(nbytes: int) -> memory.Buffer:
        sizes.append(nbytes)
        return memory.PageBuffer(nbytes)

    saves = PeriodicCheckpointConfig(save_strategy=strategy, environ={})  # type: ignore[arg-type]
    session = start(saves, background_saves=told)  # told: a framework says by itself when to save
    periodic(session)._arena = Arena(allocate)
    assert session.context.background_saves is reserved
    train(session, 1)
    session._warmup._thread.join(PATIENCE)  # type: ignore[union-attr]
    assert bool(sizes) is reserved


class Framed(Subject):
    """Has files of a framework: one that all ranks hold, one of its own in a folder."""

    def capture(self) -> Capture:
        told = memory.BytesSource(f"rank {self.rank} step {self.step}".encode())
        common = FileLayout("weights.bin", NBYTES, (Extent(0, self.live),))
        own = FileLayout(f"own/{self.rank}.txt", told.nbytes, (Extent(0, told),))
        return Capture(
            self.step,
            {"rank": self.rank, "step": self.step},
            (),
            files=(File(common, shared=True), File(own)),
        )

    rescue = behind_gate = outline = capture


def test_of_many_ranks_one_writes_what_they_share_and_each_what_is_its_own(tmp_path: Path) -> None:
    def ask(rank: int, step: int) -> None:
        if step == 2:
            periodic(crew.sessions[rank]).begin("asked")

    crew = Crew(tmp_path, 3, ask, subject=Framed)
    assert crew.train(4) == [4, 4, 4]
    assert found(tmp_path) == [(4, Kind.FINAL, 3), (2, Kind.PERIODIC, 3)]
    folder = tmp_path / "checkpoint-2"
    assert (folder / "weights.bin").read_bytes() == noise(NBYTES, 2)
    assert [(folder / "own" / f"{rank}.txt").read_text() for rank in range(3)] == [
        f"rank {rank} step 2" for rank in range(3)
    ]
    testing.assert_resumable(tmp_path, step=4, exact=True)
