from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.core.bare_core import flip
from helpers.ranks import states
from helpers.ranks.states import Live, Whole, grid, rows
from helpers.ranks.thread_ranks import PATIENCE, at_once
from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint import filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine.writer import Engine
from lastcall.core.joint import joint_start, load_vote
from lastcall.core.joint.joint_start import Joined, JointStart
from lastcall.core.ranks import rendezvous
from lastcall.core.ranks.agreement import Agreement
from lastcall.core.ranks.keys import Keys
from lastcall.core.ranks.world import World
from lastcall.core.store import client
from lastcall.core.store.client import StoreClient
from lastcall.core.store.memory import MemoryStore
from lastcall.core.store.server import StoreServer
from lastcall.core.sync.stopped import Stopped
from lastcall.storage import files as storage

CLOCK = clocks.Clock()
SHAPE = (64, 48)


class Start:
    """The ranks of a run at their start, in one directory or in several."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.store = MemoryStore()
        self.size = len(roots)
        self.told = [threading.Event() for _ in roots]
        self.catalogs = [Catalog(root, storage.Files(), rank) for rank, root in enumerate(roots)]
        for catalog in self.catalogs:
            catalog.make()
        self.engine = Engine(2)

    def joining(self, rank: int) -> JointStart:
        world = World(rank, self.size, self.store.clone)
        return JointStart(world, self.catalogs[rank], CLOCK, self.told[rank].is_set)

    def join(self, rank: int) -> Joined:
        meeting = self.joining(rank)
        if rank:
            return meeting.follow()
        self.catalogs[0].open(CLOCK)
        return meeting.lead("run", 2)

    def all_join(self) -> list[Joined | BaseException]:
        return at_once(*(partial(self.join, rank) for rank in range(self.size)))

    def load(self, lives: Sequence[Any]) -> list[Entry | BaseException | None]:
        """All ranks load, over the store where they met."""

        def one(rank: int) -> Entry | None:
            agreement = Agreement(self.store.clone(), rank, self.size, CLOCK)
            return self.joining(rank).load(agreement, self.engine, lives[rank])

        return at_once(*(partial(one, rank) for rank in range(self.size)))

    def close(self) -> None:
        self.engine.close()
        self.catalogs[0].close()


@contextlib.contextmanager
def start(*roots: Path) -> Iterator[Start]:
    made = Start(roots)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Start]:
    with start(tmp_path, tmp_path) as made:
        yield made


def joined(results: list[Joined | BaseException]) -> list[Joined]:
    assert all(isinstance(result, Joined) for result in results), results
    return [result for result in results if isinstance(result, Joined)]


# ---- meet --------------------------------------------------------------------------------------------------


def test_all_ranks_know_what_rank_0_has_opened(tmp_path: Path) -> None:
    with start(*[tmp_path] * 4) as four:
        found = joined(four.all_join())
        assert len({one.start for one in found}) == 1 and all(one.fence.holds() for one in found)
        assert (found[3].start.run, found[3].start.incarnation) == ("run", 2)
        found[1].store.set("key", b"x")
        assert found[2].store.get("key", 60.0) == b"x"


def test_what_earlier_incarnations_decided_is_swept_away(two: Start) -> None:
    old = two.catalogs[0].private / joint_start.AGREEMENT / "old"
    old.mkdir(parents=True)
    (old / "decision").write_text("step 7")
    joined(two.all_join())
    assert not old.exists()


def test_directories_that_differ_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with start(tmp_path / "one", tmp_path / "two") as apart:
        leader, follower = apart.all_join()
        assert isinstance(leader, Joined) and isinstance(follower, errors.RanksError)
        assert f"rank 0 protects {tmp_path / 'one'} and rank 1 protects {tmp_path / 'two'}" in str(follower)
        assert "export LASTCALL_RANKS=separate" in str(follower)


def test_one_directory_under_two_names_is_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with start(tmp_path / "real", tmp_path / "link") as linked:
        joined(linked.all_join())


def test_a_mount_with_another_name_on_another_machine_is_the_same_directory(two: Start) -> None:
    fence = Fence.take(two.catalogs[1].private, 1)
    said = {"run": "r", "incarnation": 1, "token": fence.token, "store": "", "root": "/mnt/elsewhere/runs"}
    Keys.made(fence.token).write(two.catalogs[1].private)
    two.store.claim("start", json.dumps(said).encode())
    assert two.joining(1).follow().start.token == fence.token


def test_a_directory_that_the_machines_do_not_share_is_refused(
    two: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_start, "_SEEN", 0.0)
    root = str(two.catalogs[1].root.resolve())
    said = {"run": "r", "incarnation": 1, "token": "written on another disk", "store": "", "root": root}
    two.store.claim("start", json.dumps(said).encode())
    with pytest.raises(
        errors.RanksError,
        match="rank 1 cannot see the files that rank 0 has written .* file system that all machines share",
    ):
        two.joining(1).follow()


def test_nobody_waits_for_a_leader_that_cannot_start(two: Start) -> None:
    two.joining(0).refuse(errors.BusyError("in use by process 7"))
    with pytest.raises(errors.RanksError, match="rank 0 could not start: BusyError: in use by process 7"):
        two.joining(1).follow()


def test_a_notice_ends_the_wait_for_rank_0(two: Start) -> None:
    two.told[1].set()
    with pytest.raises(Stopped):
        two.joining(1).follow()


def test_a_leader_that_never_comes_is_given_up(two: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TOGETHER", 0.0)
    with pytest.raises(errors.RanksError, match="rank 1 waited 0 s for rank 0 to open the directory"):
        two.joining(1).follow()


# ---- the store of the launcher -----------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", secret="s3cret")
    server.start()
    monkeypatch.setenv("LASTCALL_STORE", f"{server.address[1]}:s3cret")
    yield server
    server.stop()


def talk(found: list[Joined]) -> None:
    found[0].store.set("key", b"x")
    assert found[1].store.get("key", 60.0) == b"x"


def test_all_ranks_change_over_to_the_launchers_store(two: Start, launched: StoreServer) -> None:
    found = joined(two.all_join())
    two.store.lose()
    talk(found)
    assert not (two.catalogs[0].private / joint_start.AGREEMENT).exists()  # memory carried it
    for one in found:
        one.store.close()


def test_where_one_rank_cannot_reach_the_launchers_store_nobody_uses_it(
    two: Start, launched: StoreServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = threading.Lock()

    def for_one(*where: Any) -> StoreClient:
        if first.acquire(blocking=False):
            return StoreClient(*where)
        raise errors.StoreLost("no route to host")

    monkeypatch.setattr(client, "StoreClient", for_one)
    found = joined(two.all_join())
    launched.stop()
    talk(found)
    assert "Could not use the store of `lastcall run` on 127.0.0.1: no route to host" in caplog.text
    assert not (two.catalogs[0].private / joint_start.AGREEMENT).exists()


# ---- load --------------------------------------------------------------------------------------------------


def tensors(seed: int = 1, shape: tuple[int, ...] = SHAPE) -> dict[str, Whole]:
    return {
        "w": Whole("F32", shape, rows(shape, 2), seed),
        "b": Whole("BF16", (512,), grid((512,), {}), seed + 1),
    }


def write(begun: Start, step: int) -> Entry:
    """A checkpoint of two ranks; the number of its step is the seed of its contents."""
    path = begun.catalogs[0].root / f"checkpoint-{step}"
    made = states.write(
        path, begun.engine, {rank: states.state(tensors(10 * step), rank, 2) for rank in range(2)}
    )
    changed = dataclasses.replace(made.record, step=step, sequence=step)
    (path / records.NAME).write_bytes(changed.to_json())
    return Entry(path, changed)


def lives(step: int) -> list[Live]:
    return [Live(tensors(10 * step), rank) for rank in range(2)]


def names(results: Sequence[Entry | BaseException | None]) -> list[str | None]:
    assert not any(isinstance(result, BaseException) for result in results), results
    return [result.path.name if isinstance(result, Entry) else None for result in results]


def test_an_empty_directory_is_begun_from_the_beginning_by_all(two: Start) -> None:
    assert names(two.load(lives(1))) == [None, None]


def test_all_ranks_go_on_from_the_newest_checkpoint(two: Start) -> None:
    write(two, 1)
    write(two, 2)
    live = lives(2)
    assert names(two.load(live)) == ["checkpoint-2"] * 2
    for one in live:
        one.check(range(2))


@pytest.mark.parametrize("older", [1, 2])
@pytest.mark.parametrize("finds", [0, 1])
def test_damage_that_one_rank_finds_makes_all_load_the_older_one(two: Start, finds: int, older: int) -> None:
    for step in range(1, older + 2):
        newest = write(two, step)
    flip(newest.path / filenames.tensors("rng", finds), -1)  # which no other rank reads
    live = lives(older)
    assert names(two.load(live)) == [f"checkpoint-{older}"] * 2
    for one in live:
        one.check(range(2))
    aside = two.catalogs[0].root / f"checkpoint-{older + 1}.damaged-0"
    assert aside.is_dir() and not newest.path.exists()


def test_the_last_one_is_checked_by_all_before_anybody_loads_it(two: Start) -> None:
    flip(write(two, 1).path / filenames.tensors("rng", 1), -1)
    live = lives(1)
    assert names(two.load(live)) == [None, None]
    for one in live:
        assert not any(any(memory.owner.raw) for found in one.memory.values() for memory in found), (
            "written to before all had checked"
        )


def test_a_checkpoint_that_one_machine_does_not_see_is_not_loaded(
    two: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(two, 1)
    monkeypatch.setattr(two.catalogs[1], "entries", list)
    assert names(two.load(lives(1))) == [None, None]


def test_a_state_that_does_not_fit_on_one_rank_ends_all(two: Start) -> None:
    entry = write(two, 1)
    live = [Live(tensors(10), 0), Live(tensors(10, (32, 48)), 1)]
    fits, misfit = two.load(live)
    assert isinstance(misfit, errors.MismatchError) and "w does not fit" in str(misfit)
    assert isinstance(fits, errors.RanksError) and "rank 1: MismatchError: w does not fit" in str(fits)
    assert entry.path.is_dir()  # nobody took it for damaged


def test_nobody_waits_for_a_rank_that_was_told_to_stop_before_rank_0_came(two: Start) -> None:
    write(two, 1)
    two.told[1].set()
    with pytest.raises(Stopped):
        two.joining(1).follow()
    agreement = Agreement(two.store.clone(), 0, 2, CLOCK)
    with pytest.raises(Stopped):
        two.joining(0).load(agreement, two.engine, lives(1)[0])


@pytest.mark.parametrize("who", [0, 1])
def test_a_notice_during_the_start_vetoes_for_all(two: Start, who: int) -> None:
    write(two, 1)
    two.told[who].set()
    assert all(isinstance(result, Stopped) for result in two.load(lives(1)))


def test_a_notice_while_another_rank_is_still_loading_ends_the_wait_of_all(two: Start) -> None:
    write(two, 1)
    write(two, 2)

    class Slow(Live):
        def finish(self) -> None:
            two.told[1].set()  # comes to the other rank, which waits, or will
            assert two.store.clone().get("1/vote/load/0/decision", PATIENCE) is not None

    results = two.load([Slow(tensors(20), 0), Live(tensors(20), 1)])
    assert all(isinstance(result, Stopped) for result in results), results


def test_a_notice_after_the_vote_comes_too_late_for_a_veto(two: Start) -> None:
    write(two, 1)
    assert names(two.load(lives(1))) == ["checkpoint-1"] * 2
    two.told[0].set()
    again = Agreement(two.store.clone(), 0, 2, CLOCK)
    again.veto("load/0", load_vote.STOPPED)
    assert again.vote("load/0", True, "", CLOCK.now()).ok


def test_when_all_are_damaged_after_they_were_loaded_in_part_all_ranks_say_so(two: Start) -> None:
    write(two, 1)
    write(two, 2)
    for step in (1, 2):
        flip(two.catalogs[0].root / f"checkpoint-{step}" / filenames.tensors("rng", 1), -1)
    results = two.load(lives(2))
    assert all(isinstance(result, errors.CheckpointError) for result in results), results
    assert all("all checkpoints were damaged and have been set aside" in str(result) for result in results)


def test_a_lost_store_ends_the_start_instead_of_a_split(two: Start) -> None:
    write(two, 1)
    entered = threading.Event()

    class Losing(Live):
        def prepare(self, document: dict[str, object], stored: Any) -> Live:
            two.store.lose()
            entered.set()
            return super().prepare(document, stored)

    results = two.load([Losing(tensors(10), 0), Live(tensors(10), 1)])
    assert entered.is_set()
    assert all(isinstance(result, errors.RanksError | errors.StoreLost) for result in results), results
