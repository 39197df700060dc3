from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.core.bare_core import header_of
from helpers.ranks import states
from helpers.ranks.states import Live
from helpers.ranks.thread_ranks import PATIENCE, Company, Looked, at_once, company, replicated
from lastcall import errors, memory, testing
from lastcall.core.checkpoint import filenames
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.checkpoint.record import Entry
from lastcall.core.joint.save import Interrupted
from lastcall.core.ranks import receipts
from lastcall.core.restore import restore
from lastcall.formats import manifest
from lastcall.testing import Fault, FaultyFiles
from lastcall.types import Capture, Extent, File, FileLayout


def committed(results: list[Entry | BaseException]) -> Entry:
    """The one checkpoint that all of them return."""
    entries = [result for result in results if isinstance(result, Entry)]
    assert len(entries) == len(results), results
    assert len({entry.path for entry in entries}) == 1
    return entries[0]


def refused(results: list[Any], match: str) -> None:
    for result in results:
        assert isinstance(result, errors.SaveError) and match in str(result), results


def check(run: Company, entry: Entry, wrote: list[int] | None = None) -> None:
    """Every rank gets back what it had."""
    for member in run.members:
        live = Live(member.tensors, member.rank)
        restore.load(entry, member.engine, live, verify_first=True, rank=member.rank, size=run.size)
        live.check(range(run.size) if wrote is None else wrote)


def test_all_ranks_save_one_checkpoint_that_each_can_load(tmp_path: Path) -> None:
    with company(tmp_path, 4) as run:
        entry = committed(run.save(run.order(), step=7, metrics={"loss": 0.5}))
        assert (entry.path.name, entry.record.step, entry.record.world, entry.record.save) == (
            "checkpoint-7",
            7,
            4,
            "jit-1",
        )
        assert entry.record.exact and entry.record.metrics == {"loss": 0.5}
        check(run, entry)
        restore.verify(entry, run.members[0].engine)
        on_disk = {path.name for path in entry.path.iterdir()}
        # no receipt is left in it
        assert on_disk == {file.name for file in entry.record.files} | {records.NAME}
        assert run.staged() == []


def test_nothing_is_committed_before_the_last_receipt(tmp_path: Path) -> None:
    with company(tmp_path, 3) as run, ThreadPoolExecutor() as pool:
        looked = Looked()
        early = [pool.submit(run.members[rank].save, run.order(paused=looked)) for rank in (0, 1)]
        looked.wait()
        assert run.entries() == [] and not any(future.done() for future in early)
        last = run.members[2].save(run.order())
        assert {future.result(PATIENCE).path for future in early} == {last.path}


def test_checkpoints_follow_each_other_in_one_sequence(tmp_path: Path) -> None:
    with company(tmp_path, 2) as run:
        numbers = [
            committed(run.save(run.order(f"jit-{step}"), step=step)).record.sequence for step in (1, 2)
        ]
        assert numbers == [1, 2]
        # whoever commits the next one
        assert [member.saver.next_sequence() for member in run.members] == [3, 3]


def test_the_same_step_is_saved_twice(tmp_path: Path) -> None:
    with company(tmp_path, 2) as run:
        committed(run.save(run.order("periodic-1")))
        again = committed(run.save(run.order("jit-1")))
        assert again.record.save == "jit-1" and len(run.entries()) == 1
        check(run, again)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_part_that_cannot_be_written_aborts_on_all_ranks(tmp_path: Path, failing: int) -> None:
    files = {failing: FaultyFiles(Fault("pwrite", 1, errno.EIO, lasting=True))}
    with company(tmp_path, 3, files=files) as run:
        refused(
            run.save(run.order()),
            f"rank {failing} could not write its part: checkpoint-1 could not be saved (Input/output error)",
        )
        assert run.entries() == []


def test_a_disk_that_is_full_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    files = {1: FaultyFiles(Fault("pwrite", 1, errno.ENOSPC, lasting=True))}
    with company(tmp_path, 2, files=files) as run:
        refused(
            run.save(run.order()),
            "rank 1 could not write its part: checkpoint-1 could not be saved (No space left on device)",
        )
        assert run.entries() == []


@pytest.mark.parametrize("operation", ["open", "pwrite", "fsync", "close"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_passing_fault_on_one_rank_is_tried_again(tmp_path: Path, operation: str, failing: int) -> None:
    with company(tmp_path, 2, files={failing: FaultyFiles(Fault(operation, 1))}) as run:
        check(run, committed(run.save(run.order())))


def test_a_file_that_two_ranks_have_written_is_nobodys(tmp_path: Path) -> None:
    layout = FileLayout("sub/config.json", 2, (Extent(0, memory.BytesSource(b"{}")),))
    with company(tmp_path, 2) as run:
        refused(run.save(run.order(), files=(File(layout),)), "several ranks have written sub/config.json")
        assert run.entries() == []


def test_ranks_may_have_files_in_the_same_folders(tmp_path: Path) -> None:
    with company(tmp_path, 4) as run:
        layouts = [
            FileLayout(f"a/b/{rank}.bin", 2, (Extent(0, memory.BytesSource(b"{}")),)) for rank in range(4)
        ]
        order = run.order()
        entry = committed(
            at_once(
                *(
                    partial(member.save, order, 1, files=(File(layouts[member.rank]),))
                    for member in run.members
                )
            )
        )
        assert {path.name for path in (entry.path / "a" / "b").iterdir()} == {
            f"{rank}.bin" for rank in range(4)
        }
        assert records.read(entry.path) == entry.record


def test_after_a_failure_the_next_save_succeeds(tmp_path: Path) -> None:
    files = FaultyFiles(*(Fault("fsync", number) for number in (1, 2, 3)))
    with company(tmp_path, 2, files={1: files}) as run:
        refused(run.save(run.order("jit-1")), "rank 1 could not write its part")
        check(run, committed(run.save(run.order("jit-2"), step=2)))


def test_a_writer_that_died_before_its_receipt_aborts(tmp_path: Path) -> None:
    with company(tmp_path, 3) as run:
        run.dead.add(1)
        refused(run.save(run.order(), ranks=[0, 2]), "rank 1 died before it had written its part")
        assert run.entries() == []


def test_a_writer_that_died_after_its_receipt_has_done_its_part(tmp_path: Path) -> None:
    with company(tmp_path, 3) as run:
        order = run.order()
        part = run.members[1].joint_save.contribute(run.members[1].capture(1, order.writers), order)
        assert not part.failed
        run.dead.add(1)
        check(run, committed(run.save(order, ranks=[0, 2])))


def test_a_committer_that_died_before_the_commit_leaves_nothing(tmp_path: Path) -> None:
    with company(tmp_path, 3) as run:
        order = run.order()
        run.members[0].joint_save.contribute(run.members[0].capture(1, order.writers), order)
        run.dead.add(0)
        refused(run.save(order, ranks=[1, 2]), "rank 0, which was to commit jit-1, died before the commit")
        assert run.entries() == []


def test_a_commit_is_found_on_disk_where_its_word_never_came(tmp_path: Path) -> None:
    with company(tmp_path, 3) as run:
        order = run.order()
        silent = run.members[0].ranks
        silent.tell = lambda key, body: None  # type: ignore[method-assign]
        first = run.members[1:]
        parts = [member.joint_save.contribute(member.capture(1, order.writers), order) for member in first]
        entry = run.members[0].save(order)
        run.dead.add(0)  # between the rename and the word
        for member, part in zip(first, parts, strict=True):
            found = member.joint_save.complete(member.capture(1, order.writers), part, order)
            assert found.path == entry.path and found.record == entry.record


def test_the_loss_of_the_store_changes_nothing_once_the_save_has_begun(tmp_path: Path) -> None:
    with company(tmp_path, 3) as run:
        run.store.lose()
        check(run, committed(run.save(run.order())))


def test_without_the_store_a_failed_part_still_aborts_on_all_ranks(tmp_path: Path) -> None:
    files = {1: FaultyFiles(Fault("fsync", 1, errno.EIO), Fault("fsync", 2), Fault("fsync", 3))}
    with company(tmp_path, 2, files=files, clock=testing.FakeClock()) as run:
        run.store.lose()
        order = run.order(deadline=1060.0)
        assert all(isinstance(result, errors.SaveError) for result in run.save(order))
        assert run.entries() == []


def test_a_later_incarnation_keeps_an_older_one_from_committing(tmp_path: Path) -> None:
    with company(tmp_path, 2) as run:
        before = committed(run.save(run.order("jit-1")))
        Fence.take(tmp_path / ".lastcall", 2)
        refused(run.save(run.order("jit-2"), step=2), "a later incarnation of this run owns the directory")
        assert [entry.path for entry in run.entries()] == [before.path] and run.staged() == []


def test_pieces_that_make_no_whole_are_not_committed(tmp_path: Path) -> None:
    with company(tmp_path, 3) as run:
        order = dataclasses.replace(run.order(), writers=(0, 1))  # rank 2 held the only copy of its shard
        refused(run.save(order, ranks=[0, 1]), "the ranks' pieces do not form a whole")
        assert run.entries() == []


def test_helpers_write_what_is_their_own_and_nothing_that_others_hold(tmp_path: Path) -> None:
    with company(tmp_path, 3, tensors=replicated) as run:
        entry = committed(run.save(run.order(writers=(0, 1), helpers=(2,))))
        assert set(header_of(entry.path / filenames.tensors("model", 2))) == {"own"}
        pieces = manifest.parse((entry.path / manifest.NAME).read_bytes())["model"]["w"].pieces
        assert {filenames.rank_of(piece.file) for piece in pieces} == {0, 1}
        assert entry.record.exact
        check(run, entry)


def test_a_helper_is_waited_for(tmp_path: Path) -> None:
    with company(tmp_path, 2, tensors=replicated) as run:
        run.dead.add(1)
        refused(
            run.save(run.order(writers=(0,), helpers=(1,)), ranks=[0]),
            "rank 1 died before it had written its part",
        )


def test_missing_ranks_are_spoken_for(tmp_path: Path) -> None:
    def part_of(rank: int, step: int, mine: Capture) -> Capture:
        assert (step, mine.step) == (5, 5)
        own = states.state({}, rank, 3)
        return Capture(step, {"rank": rank}, own)

    with company(tmp_path, 3, tensors=replicated) as run:
        run.members[1].ranks.part_of = part_of
        entry = committed(run.save(run.order(writers=(1, 2), missing=(0,)), ranks=[1, 2], step=5))
        assert entry.record.exact and entry.record.step == 5
        check(run, entry)


def test_what_is_known_in_part_of_a_missing_rank_is_saved_as_not_exact(tmp_path: Path) -> None:
    with company(tmp_path, 2, tensors=replicated) as run:
        known = Capture(
            4, {"rank": 1}, states.state({}, 1, 2), exact=False, because="its data position is that of step 4"
        )
        run.members[0].ranks.part_of = lambda rank, step, mine: known
        entry = committed(run.save(run.order(writers=(0,), missing=(1,)), ranks=[0], step=5))
        assert (entry.record.exact, entry.record.step) == (False, 5)
        assert entry.record.because == "rank 1: its data position is that of step 4"
        check(run, entry)


def test_a_missing_rank_of_which_nothing_is_known_is_named(tmp_path: Path) -> None:
    with company(tmp_path, 3, tensors=replicated) as run:
        entry = committed(run.save(run.order(writers=(1,), missing=(0, 2)), ranks=[1]))
        assert (
            entry.record.because == "nothing is known about the randomness and the data position of rank 0, 2"
        )
        assert not entry.record.exact and entry.record.world == 3


def test_a_part_that_is_not_exact_makes_the_checkpoint_so(tmp_path: Path) -> None:
    with company(tmp_path, 2) as run:
        order = run.order()
        exact = lambda: run.members[0].save(order)  # noqa: E731
        other = lambda: run.members[1].save(order, exact=False, because="the optimizer has stepped")  # noqa: E731
        entry = committed(at_once(exact, other))
        assert (entry.record.exact, entry.record.because) == (False, "rank 1: the optimizer has stepped")


def test_an_interrupted_save_is_taken_up_again(tmp_path: Path) -> None:
    with company(tmp_path, 2) as run:
        paused = threading.Event()
        order = run.order(paused=paused.is_set)
        captures = [member.capture(1, order.writers) for member in run.members]
        parts = {0: run.members[0].joint_save.contribute(captures[0], order)}
        paused.set()
        for member in run.members:
            with pytest.raises(Interrupted):
                member.joint_save.complete(captures[member.rank], parts[0], order)
        assert run.entries() == [] and run.staged() == [order.name]
        paused.clear()
        parts[1] = run.members[1].joint_save.contribute(captures[1], order)
        work: list[Callable[[], Entry]] = [
            lambda m=member: m.joint_save.complete(captures[m.rank], parts[m.rank], order)  # type: ignore[misc]
            for member in run.members
        ]
        check(run, committed(at_once(*work)))


def test_receipts_that_do_not_come_before_the_deadline_end_the_save(tmp_path: Path) -> None:
    clock = testing.FakeClock()
    with company(tmp_path, 3, clock=clock) as run:
        run.store.lose()
        with pytest.raises(errors.DeadlineError, match="no receipt came in time from rank 1, 2"):
            run.members[0].save(run.order(deadline=clock.now() + 5))
        assert run.staged() == []


def test_a_committer_that_is_silent_is_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    clock = testing.FakeClock()
    with company(tmp_path, 2, clock=clock) as run:
        run.store.lose()
        with pytest.raises(
            errors.SaveError, match="rank 0, which was to commit jit-1, has not committed it in time"
        ):
            run.members[1].save(run.order(deadline=clock.now() + 5))


def test_a_save_that_is_given_up_ends_on_all_ranks(tmp_path: Path) -> None:
    with company(tmp_path, 2) as run, ThreadPoolExecutor() as pool:
        given_up, looked = threading.Event(), Looked()
        waiting = pool.submit(run.members[0].save, run.order(abandoned=given_up.is_set, paused=looked))
        looked.wait()
        given_up.set()
        with pytest.raises(errors.DeadlineError, match="abandoned"):
            waiting.result(PATIENCE)
        with pytest.raises(errors.SaveError, match="abandoned"):
            run.members[1].save(run.order())
        assert run.entries() == []


def test_a_damaged_receipt_is_not_believed(tmp_path: Path) -> None:
    with company(tmp_path, 2) as run:
        order = run.order()
        folder = run.members[0].catalog.staging / order.name
        run.members[1].joint_save.contribute(run.members[1].capture(1, order.writers), order)
        path = folder / filenames.part(1)
        path.write_bytes(path.read_bytes().replace(b'"written": ', b'"written": 1'))
        with pytest.raises(errors.SaveError, match="receipt of rank 1 does not match its digest"):
            run.members[0].save(order)
        assert receipts.read(folder, 1) is None and run.entries() == []
