"""From a capture to a committed checkpoint: what is known to be saved, who is told, and one save at a
time."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.core.answers import NOW
from helpers.core.solo import Solo
from helpers.ranks.thread_ranks import at_once
from lastcall import errors, testing
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpointer import Checkpointer
from lastcall.core.save.saver import Request
from lastcall.core.subject import Boundary
from lastcall.testing import Fault, FaultyFiles
from lastcall.types import Capture, Kind


class Elsewhere:
    """A writer whose newest checkpoint is in a directory that this rank does not see; it writes the half of
    what it is given."""

    newest_is_here = False

    def __init__(self, real: Any) -> None:
        self._real = real
        self.written: list[tuple[int, Request, Boundary]] = []
        self.change: dict[str, Any] = {}  # what of the record is different from what was asked for

    def has(self, name: str) -> bool:
        return name == "checkpoint-99"

    def portion(self, capture: Capture) -> Capture:
        return dataclasses.replace(capture, document={**capture.document, "portion": True})

    def write(self, capture: Capture, request: Request, boundary: Boundary) -> Entry:
        self.written.append((capture.step, request, boundary))
        entry: Entry = self._real.save(capture, request)
        return dataclasses.replace(entry, record=dataclasses.replace(entry.record, **self.change))


@pytest.fixture
def solo(tmp_path: Path) -> Iterator[Solo]:
    with Solo(tmp_path) as made:
        yield made


@pytest.fixture
def elsewhere(solo: Solo) -> Elsewhere:
    return Elsewhere(solo.started.saver)


def save(made: Checkpointer, solo: Solo, kind: Kind = Kind.MANUAL, deadline: float | None = None) -> Entry:
    return made.save(solo.subject.capture(), kind, "run.save()", deadline)


# ---- what is saved -----------------------------------------------------------------------------------------


def test_a_fresh_run_has_nothing_saved(solo: Solo) -> None:
    made = solo.checkpointer
    assert (made.up_to_date, made.covers_now, made.keeps_boundary, made.resumed_only) == (
        False,
        False,
        False,
        True,
    )


def test_after_a_save_this_boundary_is_saved_until_the_next_one(solo: Solo, tmp_path: Path) -> None:
    made = solo.checkpointer
    entry = save(made, solo)
    assert (made.up_to_date, made.covers_now, made.keeps_boundary, made.resumed_only) == (
        True,
        True,
        True,
        False,
    )
    assert entry.path.name == "checkpoint-3" and testing.assert_resumable(tmp_path, 3, exact=True)
    solo.train(1)
    assert (made.up_to_date, made.covers_now, made.keeps_boundary, made.resumed_only) == (
        False,
        False,
        False,
        False,
    )


def test_what_has_changed_since_the_boundary_is_not_covered(solo: Solo) -> None:
    save(solo.checkpointer, solo)
    solo.subject.touched = True
    assert solo.checkpointer.up_to_date and not solo.checkpointer.covers_now


def test_a_checkpoint_in_another_directory_is_up_to_date_and_not_found_here(
    solo: Solo, elsewhere: Elsewhere
) -> None:
    made = Checkpointer(solo.context, elsewhere, None)
    save(made, solo)
    assert made.up_to_date and not made.keeps_boundary


@pytest.mark.parametrize(
    "change", [{"exact": False, "because": "torn"}, {"missing": ("optimizer.safetensors",)}]
)
def test_a_checkpoint_that_is_not_whole_or_not_complete_covers_no_boundary(
    solo: Solo, elsewhere: Elsewhere, change: dict[str, Any]
) -> None:
    made = Checkpointer(solo.context, elsewhere, None)
    elsewhere.change = change
    save(made, solo)
    assert not made.up_to_date and not made.resumed_only


def test_a_run_in_doubt_is_covered_by_the_whole_of_what_it_handed_over(
    solo: Solo, elsewhere: Elsewhere
) -> None:
    made = Checkpointer(solo.context, elsewhere, None)
    elsewhere.change = {
        "exact": False,
        "because": "a stream is not followed",
        "doubt": "a stream is not followed",
    }
    save(made, solo)
    assert made.up_to_date


def test_what_was_resumed_from_is_up_to_date_until_an_adapter_says_that_it_continues_from_something_else(
    tmp_path: Path,
) -> None:
    with Solo(tmp_path) as first:
        save(first.checkpointer, first)
    with Solo(tmp_path, steps=0) as again:
        made = again.checkpointer
        assert made.up_to_date and made.resumed_only
        made.forget_resumed()
        assert not made.up_to_date and made.resumed_only


def test_a_document_is_the_same_only_as_that_of_the_newest_commit_of_this_incarnation(solo: Solo) -> None:
    made, capture = solo.checkpointer, solo.subject.capture()
    assert not made.same_document(capture)
    save(made, solo)
    assert made.same_document(capture)
    assert not made.same_document(dataclasses.replace(capture, document={"step": 4}))


def test_a_checkpoint_is_known_by_its_name_here_or_where_the_ranks_have_committed_it(
    solo: Solo, elsewhere: Elsewhere
) -> None:
    made = Checkpointer(solo.context, elsewhere, None)
    assert not made.has("checkpoint-3") and made.has("checkpoint-99")
    save(made, solo)
    assert made.has("checkpoint-3")


# ---- how long it takes -------------------------------------------------------------------------------------


def test_what_a_save_takes_is_what_is_expected_of_its_bytes(solo: Solo) -> None:
    made = solo.checkpointer
    least = made.seconds()
    made.expected_bytes = 10**9
    assert made.seconds() > least + 1.0
    assert made.seconds_until_safe(NOW + 60.0) == made.seconds()  # nothing follows it


def test_a_save_is_safe_once_what_follows_it_is_done_where_the_time_holds_both(solo: Solo) -> None:
    solo.context.budget.afterwards = lambda nbytes: 10.0
    made = solo.checkpointer
    assert made.seconds_until_safe(NOW + 60.0) == made.seconds() + 10.0
    assert made.seconds_until_safe(NOW + 5.0) == made.seconds()


# ---- who is told -------------------------------------------------------------------------------------------


def test_a_save_is_told_before_it_begins_and_after_it_is_committed(solo: Solo) -> None:
    order: list[Any] = []
    made = Checkpointer(
        solo.context,
        solo.started.saver,
        None,
        [lambda capture, kind, deadline: order.append(("before", capture.step, kind, deadline, solo.kept))],
        [lambda entry, capture: order.append(("after", entry.path.name, capture.step, made.up_to_date))],
    )
    save(made, solo, Kind.JIT, NOW + 30.0)
    assert order == [("before", 3, Kind.JIT, NOW + 30.0, []), ("after", "checkpoint-3", 3, True)]


def test_the_events_of_a_save_have_what_a_reader_needs(solo: Solo) -> None:
    solo.events.clear()
    entry = save(solo.checkpointer, solo)
    (began,), (committed,) = solo.said("save-begins"), solo.said("committed")
    assert began == {"save": "manual", "step": 3, "bytes": solo.subject.capture().nbytes}
    assert {key: committed[key] for key in ("save", "step", "exact", "because", "path")} == {
        "save": "manual", "step": 3, "exact": True, "because": "", "path": "checkpoint-3",
    }  # fmt: skip
    assert (committed["written"], committed["seconds"]) == (entry.record.written, 0.0)


def test_a_save_that_fails_is_no_commit_and_the_one_before_stays_the_newest(tmp_path: Path) -> None:
    files = FaultyFiles()
    with Solo(tmp_path, files=files) as solo:
        save(solo.checkpointer, solo)
        solo.train(1)
        files._faults = (Fault("fsync", files.calls["fsync"] + 1, errno.EIO, lasting=True),)
        with pytest.raises(errors.SaveError):
            save(solo.checkpointer, solo)
        assert not solo.checkpointer.up_to_date and len(solo.said("committed")) == 1
        assert solo.kept == [(3, "manual", "run.save()")]


def test_the_boundary_that_is_committed_is_the_one_at_which_the_save_began(
    solo: Solo, elsewhere: Elsewhere
) -> None:
    """Training goes on beside a rescue that saves from the side."""
    made = Checkpointer(solo.context, elsewhere, None, [], [])
    capture = solo.subject.capture()
    write = elsewhere.write

    def slow(capture: Capture, request: Request, boundary: Boundary) -> Entry:
        solo.train(1)
        return write(capture, request, boundary)

    elsewhere.write = slow  # type: ignore[method-assign]
    made.save(capture, Kind.RESCUE, "SIGTERM")
    assert not made.up_to_date
    assert elsewhere.written[0][2] == (3, 0)


# ---- by whom -----------------------------------------------------------------------------------------------


def test_a_writer_gets_its_portion_with_why_and_until_when(solo: Solo, elsewhere: Elsewhere) -> None:
    made = Checkpointer(solo.context, elsewhere, None)
    capture = solo.subject.capture()
    made.save(capture, Kind.JIT, "SIGTERM", NOW + 9.0)
    step, request, boundary = elsewhere.written[0]
    assert (step, request.kind, request.reason, request.deadline, boundary) == (
        3,
        Kind.JIT,
        "SIGTERM",
        NOW + 9.0,
        (3, 0),
    )
    assert made.portion(capture).document["portion"] is True
    assert made.same_document(capture)  # what is remembered is the whole


def test_what_the_ranks_have_agreed_on_is_written_by_them_and_counts_as_every_other(
    solo: Solo, elsewhere: Elsewhere
) -> None:
    made = Checkpointer(solo.context, elsewhere, None)
    capture = solo.subject.capture()
    agreed = Request(Kind.SURVIVORS, "rank 1 is gone")
    entry = made.save_agreed(capture, Kind.SURVIVORS, lambda: solo.started.saver.save(capture, agreed))
    assert elsewhere.written == [] and made.up_to_date and entry.record.kind is Kind.SURVIVORS
    assert [facts["save"] for facts in solo.said("save-begins")] == ["survivors"]


def test_a_thread_that_saves_keeps_every_other_out_and_may_save_again_itself(solo: Solo) -> None:
    made = solo.checkpointer
    with made.lock:
        save(made, solo)
        assert made.lock.acquire(blocking=False)
        made.lock.release()
        assert at_once(lambda: made.lock.acquire(blocking=False)) == [False]
