"""Ranks whose directories differ: their parts arrive in that of the committer, or there is no checkpoint."""

from __future__ import annotations

import errno
import itertools
import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.core.bare_core import flip
from helpers.processes import forkserver as nursery
from helpers.ranks.states import Live
from helpers.ranks.thread_ranks import PATIENCE, Company, Member, at_once, company, replicated
from lastcall import clock as clocks
from lastcall import errors, memory
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine import digest
from lastcall.core.ranks import receipts
from lastcall.core.ranks.receipts import Part
from lastcall.core.restore import restore
from lastcall.core.sync.stopped import Stopped
from lastcall.core.transfer import parts
from lastcall.core.transfer.directories import FIRST
from lastcall.core.transfer.parts import PartTransfer
from lastcall.testing import Fault, FaultyFiles
from lastcall.types import Extent, File, FileLayout, FileRecord

APART = [FIRST, FIRST, "b", "b"]


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Company]:
    with company(tmp_path, 4, homes=APART) as run:
        yield run


def saved(results: list[Entry | BaseException]) -> Entry:
    """The committer's."""
    assert all(isinstance(result, Entry) for result in results), results
    assert isinstance(results[0], Entry)
    return results[0]


def sender(member: Member) -> PartTransfer:
    assert member.joint_save.part_transfer is not None
    return member.joint_save.part_transfer


def test_the_committers_directory_has_the_parts_of_all(four: Company) -> None:
    results = four.save(four.order(), step=7)
    entry = saved(results)
    restore.verify(entry, four.members[0].engine)
    for member in four.members:
        live = Live(member.tensors, member.rank)
        restore.load(entry, member.engine, live, verify_first=True, rank=member.rank, size=4)
        live.check(range(4))
    assert {path.name for path in entry.path.iterdir()} == {file.name for file in entry.record.files} | {
        records.NAME
    }
    assert entry.path.parent == four.root_of(0)
    assert not list(four.root_of(2).glob("checkpoint-*"))
    for result in results:
        assert isinstance(result, Entry)
        assert (result.path.name, result.record.step, result.record.sequence) == ("checkpoint-7", 7, 1)


def test_nothing_is_left_where_parts_were_written(four: Company) -> None:
    saved(four.save(four.order()))
    for member in (four.members[0], four.members[2]):
        assert not list(member.catalog.staging.iterdir())


def test_parts_may_have_folders(four: Company) -> None:
    def layout(rank: int) -> File:
        return File(FileLayout(f"a/b/{rank}.bin", 2, (Extent(0, memory.BytesSource(b"{}")),)))

    order = four.order()
    entry = saved(
        at_once(*(partial(member.save, order, 1, files=(layout(member.rank),)) for member in four.members))
    )
    assert sorted(path.name for path in (entry.path / "a" / "b").iterdir()) == [
        "0.bin",
        "1.bin",
        "2.bin",
        "3.bin",
    ]
    assert not list(four.members[2].catalog.staging.glob("*/*.bin"))


def test_survivors_commit_where_the_lowest_of_them_is(tmp_path: Path) -> None:
    with company(tmp_path, 4, tensors=replicated, homes=APART) as run:
        run.dead |= {0, 1}
        results = run.save(run.order(writers=(2, 3), missing=(0, 1)), ranks=(2, 3), step=3)
        assert all(
            isinstance(result, Entry) and result.path == run.root_of(2) / "checkpoint-3" for result in results
        ), results
        assert run.members[3].joint_save.holder_of_newest == 2
        assert not list(run.root_of(0).glob("checkpoint-*"))


@pytest.mark.parametrize("what", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_disk_that_fails_on_either_side_means_no_checkpoint_on_all_ranks(
    tmp_path: Path, failing: int, what: int
) -> None:
    """Of the committer only what comes from others fails: it has written its own part before."""
    files = FaultyFiles(Fault("pwrite", 1, what, lasting=True))
    with company(tmp_path, 4, files={failing: files}, homes=APART) as run:
        results = run.save(run.order())
        assert all(isinstance(result, errors.SaveError) for result in results), results
        assert not list(tmp_path.glob("*/checkpoint-*"))


def test_a_committer_that_is_not_reached_means_no_checkpoint(four: Company) -> None:
    sender(four.members[0]).close()
    results = four.save(four.order())
    assert all(isinstance(result, errors.SaveError) for result in results), results
    assert "could not send its part to rank 0" in str(results[2])
    assert not list(four.root.glob("*/checkpoint-*"))


def test_what_nobody_wants_any_more_is_not_sent(four: Company) -> None:
    results = four.save(four.order(abandoned=lambda: True))
    assert all(isinstance(result, errors.SaveError) for result in results), results


def test_space_is_used_again_on_both_sides(tmp_path: Path) -> None:
    with company(tmp_path, 2, homes=[FIRST, "b"]) as run:
        first = saved(run.save(run.order()))
        assert run.members[1].catalog.spares.sizes()  # where it was written
        arrived = (first.path / "model-00001.safetensors").stat().st_ino
        run.members[0].catalog._discard(first.path)
        second = saved(run.save(run.order("jit-2"), step=2))
        assert (second.path / "model-00001.safetensors").stat().st_ino == arrived
        restore.verify(second, run.members[0].engine)


# ---- what holds a sender up --------------------------------------------------------------------------------

LARGE = 64 * 1024 * 1024  # more than what a connection holds on its way


def large(folder: Path, rank: int) -> Part:
    """A part of a size at which a sender waits for the receiver."""
    data, chunk = bytes(LARGE), 16 * 1024 * 1024
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "large.bin").write_bytes(data)
    chunks = tuple(digest.of(data[begin : begin + chunk]) for begin in range(0, LARGE, chunk))
    return Part(rank, 1, (FileRecord("large.bin", LARGE, digest.over(chunks), chunk, chunks),))


@pytest.mark.parametrize("answers", [False, True])
def test_a_committer_that_does_not_go_on_holds_nobody_up_once_time_is_over(
    four: Company, tmp_path: Path, answers: bool
) -> None:
    """It takes nothing, or takes all and does not answer: as a frozen process does, or a machine behind a
    link that was cut."""
    part, over = large(tmp_path / "part", 2), threading.Event()

    def check() -> None:
        if over.is_set():
            raise errors.DeadlineError("the time ran out")

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        four.store.set("part_transfer/0", json.dumps(["127.0.0.1", deaf.getsockname()[1]]).encode())
        with ThreadPoolExecutor(1) as pool:
            giving = pool.submit(
                sender(four.members[2]).send_part, 0, "jit-1", tmp_path / "part", part, check
            )
            link, _ = deaf.accept()
            with link:
                left = LARGE if answers else 1
                while left > 0:
                    left -= len(link.recv(1 << 20))
                over.set()
                with pytest.raises(errors.DeadlineError):
                    giving.result(10.0)


def test_a_sender_hears_why_its_part_is_not_taken(tmp_path: Path) -> None:
    files = FaultyFiles(Fault("pwrite", 1, errno.ENOSPC, lasting=True))
    with company(tmp_path, 2, files={0: files}, homes=[FIRST, "b"]) as run:
        part = large(tmp_path / "part", 1)
        with pytest.raises(
            errors.SaveError, match="rank 0 could not receive its part: No space left on device"
        ):
            sender(run.members[1]).send_part(0, "jit-1", tmp_path / "part", part, lambda: None)


def test_a_part_that_comes_after_the_end_leaves_nothing_behind(four: Company, tmp_path: Path) -> None:
    part = large(tmp_path / "part", 2)
    results = at_once(partial(four.members[0].save, four.order(deadline=clocks.Clock().now() + 0.5)))
    assert isinstance(results[0], errors.DeadlineError)
    with pytest.raises(errors.SaveError, match="it was abandoned"):
        sender(four.members[2]).send_part(0, "jit-1", tmp_path / "part", part, lambda: None)
    assert four.staged() == []


def test_a_part_that_is_on_its_way_at_the_end_leaves_nothing_behind(four: Company, tmp_path: Path) -> None:
    part, looks = large(tmp_path / "part", 2), itertools.count()

    def check() -> None:
        if next(looks) == 8:  # in the middle of it
            four.members[0].joint_save.refuse(four.order(), "no part of its own")

    with pytest.raises(errors.SaveError):
        sender(four.members[2]).send_part(0, "jit-1", tmp_path / "part", part, check)
    nursery.until(
        lambda: not list(four.members[0].catalog.staging.glob("*/large.bin")),
        "the receiver to clear it away",
        PATIENCE,
    )


def test_a_part_that_could_not_be_sent_leaves_nothing_where_it_was_written(four: Company) -> None:
    sender(four.members[0]).close()
    assert isinstance(
        four.members[2].joint_save.contribute(four.members[2].capture(1, (0, 1, 2, 3)), four.order()), Part
    )
    assert not list(four.members[2].catalog.staging.glob("*"))


def test_a_connection_that_cannot_be_taken_up_is_not_the_last(
    four: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = sender(four.members[0])
    real, tries = listener._listening, itertools.count()

    class Short:
        """Of file descriptors, for a moment."""

        def accept(self) -> Any:
            if next(tries) == 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(listener, "_listening", Short())
    # the first one is taken up by a call that was under way
    for order in (four.order(), four.order("jit-2")):
        saved(four.save(order))


# ---- a checkpoint for a machine that has none --------------------------------------------------------------


def test_a_checkpoint_is_brought_from_another_directory(four: Company) -> None:
    entry = saved(four.save(four.order(), step=5))
    sender(four.members[2]).fetch(0, entry.record.fingerprint, lambda: False)
    (brought,) = four.members[2].catalog.entries()
    assert brought.record == entry.record and brought.path.name == "checkpoint-5"
    restore.verify(brought, four.members[2].engine)


def test_one_that_is_not_there_is_said_to_be(four: Company) -> None:
    with pytest.raises(errors.StorageError, match="it is not there"):
        sender(four.members[2]).fetch(0, "0" * 32, lambda: False)
    assert not list(four.members[2].catalog.staging.glob("*"))


def test_damage_is_found_where_it_arrives(four: Company) -> None:
    entry = saved(four.save(four.order()))
    flip(entry.path / entry.record.files[-1].name, 5)
    with pytest.raises(errors.CheckpointError, match="does not match its digest"):
        sender(four.members[2]).fetch(0, entry.record.fingerprint, lambda: False)
    assert four.members[2].catalog.entries() == [] and not list(four.members[2].catalog.staging.iterdir())


def test_a_notice_ends_it(four: Company) -> None:
    entry = saved(four.save(four.order()))
    with pytest.raises(Stopped):
        sender(four.members[2]).fetch(0, entry.record.fingerprint, lambda: True)
    assert four.members[2].catalog.entries() == []


# ---- strangers ---------------------------------------------------------------------------------------------


def address(run: Company, rank: int) -> tuple[str, int]:
    told = run.store.get(f"part_transfer/{rank}", 1.0)
    assert told is not None
    host, port = json.loads(told)
    return host, port


def test_who_does_not_know_the_secret_is_not_answered(four: Company) -> None:
    for hello in (b"wrong" + bytes(27), b""):
        with socket.create_connection(address(four, 0), 5) as link:
            link.sendall(struct.pack(">Q", len(hello)) + hello)
            link.settimeout(5)
            assert link.recv(1) == b""
    with socket.create_connection(address(four, 0), 5) as link:
        link.sendall(struct.pack(">Q", 1 << 62))
        link.settimeout(5)
        assert link.recv(1) == b""


@pytest.mark.parametrize(
    "request_",
    [
        {"give": {"save": "../../etc", "part": None}},
        {"give": {"save": "jit-1"}},
        {"give": {"save": "jit-1", "rank": -1, "part": {}}},
        {"give": {"save": "jit-1", "rank": "2", "part": {}}},
        {"give": {"save": "jit-1", "rank": 2, "part": {}}},
        {"give": {}},
        {"give": []},
        {},
        {"ask": {}},
        {"ask": {"record": ["x"]}},
    ],
)
def test_requests_that_make_no_sense_are_answered_with_an_error(
    four: Company, request_: dict[str, Any]
) -> None:
    with sender(four.members[2])._connected(0, lambda: None) as wire:
        wire.send(request_)
        assert wire.receive()["error"]
    saved(four.save(four.order()))  # and nothing has come of it


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "lastcall.json", "a/../../b"])
def test_files_outside_of_the_save_are_refused(four: Company, name: str) -> None:
    part = Part(2, 1, (FileRecord(name, 1, "d", 4096, ("d",)),))
    with sender(four.members[2])._connected(0, lambda: None) as wire:
        wire.send({"give": {"save": "jit-1", "rank": 2, "part": json.loads(receipts.packed(part))}})
        assert "not a plain name" in wire.receive()["error"]
    assert not (four.root_of(0) / ".lastcall" / "staging").exists()


@pytest.mark.parametrize("save", ["../x", "", "/x", "a/b", ".", "x" * 300])
def test_names_that_no_save_has_are_refused(four: Company, save: str) -> None:
    with pytest.raises(errors.SaveError, match="not the name of a save"):
        sender(four.members[2]).send_part(0, save, four.root_of(2), Part(2, 1), lambda: None)
    assert not (four.root_of(0) / ".lastcall" / "x").exists()


def test_a_receipt_that_was_changed_on_its_way_is_refused(four: Company) -> None:
    whole = json.loads(receipts.packed(Part(2, 1)))
    whole["part"]["step"] = 2
    with sender(four.members[2])._connected(0, lambda: None) as wire:
        wire.send({"give": {"save": "jit-1", "rank": 2, "part": whole}})
        assert "does not match its digest" in wire.receive()["error"]


@pytest.mark.parametrize(
    ("first", "resolved", "own", "told"),
    [
        ("node-0", "10.0.0.1", "10.0.0.2", "10.0.0.2"),  # from another machine
        ("node-0", "10.0.0.1", "10.0.0.1", "node-0"),  # on that one
        # which knows its own name as that, and nobody else does
        ("node-0", "127.0.1.1", "127.0.0.1", "node-0"),
        ("10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.1"),
    ],
)
def test_an_address_is_one_that_others_can_use(
    monkeypatch: pytest.MonkeyPatch, first: str, resolved: str, own: str, told: str
) -> None:
    class Probe(socket.socket):
        def connect(self, place: Any) -> None:
            assert place[0] == resolved

        def getsockname(self) -> Any:
            return own, 1

    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (resolved, 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", Probe)
    assert parts.own_address(first) == told


def test_an_address_without_a_way_there_is_the_name_of_this_machine() -> None:
    assert parts.own_address("127.0.0.1") == "127.0.0.1"
    assert parts.own_address("no-such-host.invalid") == socket.gethostname()
