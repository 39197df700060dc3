"""The corners of following a loader: passes left early, several iterators, changed settings, copies,
failures."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from helpers.data import loaders as harness
from helpers.data.loaders import Augmented, Stream, loader_of
from lastcall import errors
from lastcall.adapters.torch.data import iterators as data_iterators
from lastcall.adapters.torch.data import loaders as data
from lastcall.adapters.torch.data import position as data_position
from lastcall.adapters.torch.data import worker_side as data_workers
from lastcall.adapters.torch.data.objects import lazy

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # a machine with one core
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


class Fragile(Dataset[Any]):
    """One sample cannot be loaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        drawn = harness.noise()
        if index == 3:
            raise OSError("unreadable")
        return index, drawn


class LazySampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for _ in range(8):
            yield random.randrange(8)

    def __len__(self) -> int:
        return 8


class Labelled(DataLoader[Any]):
    """A subclass as libraries make them: both its hooks still have to be heard."""

    def _get_iterator(self) -> Any:
        self.opened = getattr(self, "opened", 0) + 1
        return super()._get_iterator()

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield "labelled", batch


def follow(loader: Any) -> data.LoaderTracker:
    tracker = data.track(loader)
    assert isinstance(tracker, data.LoaderTracker)
    tracker.attach()
    return tracker


def resume(loader: Any, state: dict[str, Any]) -> data.LoaderTracker:
    tracker = follow(loader)
    tracker.load(copy.deepcopy(state))
    return tracker


def indices(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def shuffled(**options: Any) -> DataLoader[Any]:
    return loader_of(Augmented(8), batch_size=2, shuffle=True, **{"seeded": True, **options})


def leave_early(opened: Any, loader: Any, passes: int, seen: list[str]) -> None:
    for number in range(passes):
        for taken, batch in enumerate(opened if number == 0 else loader):
            seen.append(harness.digest(batch))
            harness.noise()
            if taken == 1:
                break
        harness.noise()


@pytest.mark.parametrize("cut", ["after leaving", "after opening the next"])
@pytest.mark.parametrize("dataset", [Augmented(14), Stream(14)], ids=["map", "iterable"])
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_after_a_pass_left_early_the_next_one_is_fresh(
    options: dict[str, Any], dataset: Any, cut: str
) -> None:
    def make() -> Any:
        return loader_of(dataset, batch_size=2, **options)

    harness.seed()
    expected: list[str] = []
    loader = make()
    leave_early(iter(loader), loader, 4, expected)

    harness.seed()
    seen: list[str] = []
    loader = make()
    tracker = follow(loader)
    leave_early(iter(loader), loader, 2, seen)
    assert tracker.state()["phase"] == data_position.LEFT
    passage = iter(loader) if cut == "after opening the next" else None
    state, rng = tracker.state(), harness.main_rng()
    del passage
    harness.noise()
    loader = make()
    resume(loader, state)
    harness.put_main_rng(rng)
    leave_early(iter(loader), loader, 2, seen)
    assert seen == expected


def test_a_peek_inside_a_pass_does_not_move_the_position() -> None:
    loader = shuffled()
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    next(passage)
    next(iter(loader))
    assert (tracker.delivered, tracker.exhausted) == (2, False)
    assert tracker.state()["begun"] == 2


def test_of_two_iterators_alive_the_younger_one_counts() -> None:
    loader = shuffled()
    tracker = follow(loader)
    older, younger = iter(loader), iter(loader)
    next(younger)
    next(older)
    next(older)
    assert tracker.delivered == 1
    del younger
    assert tracker.delivered == 2


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_the_last_batch_is_not_the_end_until_the_end_is_seen(options: dict[str, Any]) -> None:
    loader = shuffled(**options)
    tracker = follow(loader)
    passage = iter(loader)
    for _ in range(4):
        next(passage)
    unseen = tracker.state()
    assert not tracker.exhausted
    with pytest.raises(StopIteration):
        next(passage)
    assert tracker.exhausted
    assert resume(shuffled(**options), tracker.state()).exhausted

    second = shuffled(**options)
    follower = resume(second, unseen)
    assert follower.delivered == 4
    assert list(second) == []
    assert indices(second) == indices(loader)


def test_a_state_does_not_change_after_it_was_taken() -> None:
    loader = shuffled(num_workers=2, persistent_workers=True)
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    state = tracker.state()
    before = copy.deepcopy(state)
    list(passage)
    list(loader)
    assert state == before


def test_a_loaded_position_is_saved_again_unchanged_if_nothing_was_drawn() -> None:
    loader = shuffled()
    tracker = follow(loader)
    next(iter(loader))
    passage = iter(loader)
    next(passage)
    state = tracker.state()
    second = shuffled()
    follower = resume(second, state)
    assert follower.state() == state
    opened = iter(second)
    assert follower.state() == state
    assert indices(opened) == indices(passage)


def test_while_attached_the_loader_looks_the_same_and_afterwards_it_is_the_same() -> None:
    loader = shuffled()
    shown = repr(loader)
    tracker = follow(loader)
    tracker.attach()
    assert isinstance(loader, DataLoader)
    assert repr(loader) == shown
    assert len(loader) == 4
    with pytest.raises(ValueError, match="DataLoader is initialized"):
        loader.batch_size = 3
    tracker.detach()
    tracker.detach()
    assert type(loader) is DataLoader
    assert set(vars(loader)) == set(vars(shuffled()))
    list(loader)
    assert tracker.state()["begun"] == 0


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_a_copy_of_a_followed_loader_is_a_plain_loader(copier: Any) -> None:
    loader = shuffled(seeded=False)
    tracker = follow(loader)
    twin = copier(loader)
    assert type(twin) is DataLoader
    assert len(list(twin)) == 4
    assert tracker.state()["begun"] == 0


def test_two_trackers_on_one_loader_report_the_same_position() -> None:
    loader = shuffled()
    first, second = follow(loader), follow(loader)
    passage = iter(loader)
    next(passage)
    assert first.delivered == second.delivered == 1
    first.detach()
    next(passage)
    assert second.delivered == 2
    assert type(loader) is not DataLoader
    second.detach()
    assert type(loader) is DataLoader


def test_what_a_subclass_overrides_still_happens() -> None:
    def make() -> Labelled:
        return Labelled(Augmented(8), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))

    loader = make()
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    state = tracker.state()
    second = make()
    resume(second, state)
    rest = list(second)
    assert [label for label, _ in rest] == ["labelled"] * 3
    assert indices(batch for _, batch in rest) == indices(batch for _, batch in passage)
    assert second.opened == 1


def test_persistent_workers_end_with_their_loader() -> None:
    gc.collect()
    loader = shuffled(num_workers=1, persistent_workers=True)
    tracker = follow(loader)
    next(iter(loader))
    iterator = weakref.ref(loader._iterator)
    gc.disable()
    try:
        del loader, tracker
        assert iterator() is None
    finally:
        gc.enable()


def test_persistent_workers_of_before_are_started_anew(caplog: pytest.LogCaptureFixture) -> None:
    loader = shuffled(num_workers=1, persistent_workers=True)
    next(iter(loader))
    tracker = follow(loader)
    assert "they are restarted for the next pass" in caplog.text
    passage = iter(loader)
    next(passage)
    assert tracker.state()["pool"] is not None


def test_followed_persistent_workers_survive_detaching_and_attaching() -> None:
    loader = shuffled(num_workers=1, persistent_workers=True)
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    tracker.detach()
    next(passage)
    again = follow(loader)
    assert again.delivered == 2
    assert again.state()["pool"] is not None


@pytest.mark.parametrize("options", WORKERS[:2], ids=str)
def test_a_batch_that_failed_is_not_tried_again(options: dict[str, Any]) -> None:
    def make() -> Any:
        return loader_of(Fragile(), batch_size=2, **options)

    harness.seed()
    loader = make()
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    with pytest.raises(OSError, match="unreadable"):
        next(passage)
    state, rng = tracker.state(), harness.main_rng()
    rest = [harness.digest(batch) for batch in passage]
    second = make()
    resume(second, state)
    harness.put_main_rng(rng)
    if options:
        assert indices(second) == [[4, 5], [6, 7]]  # what the failed batch drew in its worker is not known
    else:
        assert [harness.digest(batch) for batch in second] == rest


def test_another_number_of_workers_keeps_the_order_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    for before, after in [(0, 2), (2, 0), (2, 1)]:
        for own in (True, False):
            harness.seed()
            loader = shuffled(num_workers=before, seeded=own)
            tracker = follow(loader)
            passage = iter(loader)
            next(passage)
            state = tracker.state()
            caplog.clear()
            harness.noise()
            second = shuffled(num_workers=after, seeded=own)
            resume(second, state)
            assert f"num_workers was {before} and is now {after}" in caplog.text
            assert indices(second) == indices(passage)


def test_another_batch_size_goes_on_at_the_same_batch_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(Augmented(8), batch_size=2)
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    second = loader_of(Augmented(8), batch_size=3)
    resume(second, tracker.state())
    assert "batch_size was 2 and is now 3" in caplog.text
    assert indices(second) == [[3, 4, 5], [6, 7]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shorter_dataset_goes_on_with_the_next_pass_and_warns(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(Augmented(8), batch_size=2)
    tracker = follow(loader)
    passage = iter(loader)
    for _ in range(3):
        next(passage)
    second = loader_of(Augmented(4), batch_size=2, num_workers=workers)
    resume(second, tracker.state())
    assert list(second) == []
    assert "had 4 batches and now has 2" in caplog.text
    assert "counts as ended" in caplog.text
    assert indices(second) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_draws_too_often_from_a_global_generator_is_warned_about_once(
    workers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G4: as many draws as are saved are exact, and silent."""
    monkeypatch.setattr(lazy, "MOST", 3)
    loader = loader_of(Augmented(8), sampler=LazySampler(), num_workers=workers)
    follow(loader)
    list(loader)
    list(loader)
    assert caplog.text.count("draws from a global random generator") == 1


@pytest.mark.parametrize(("then", "warned"), [(3, False), (1, True)])
def test_a_sampler_told_another_epoch_goes_on_with_the_interrupted_one(
    then: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """G11: the counter of a script may come back only when its loop begins. What it counts next is what
    tells."""

    def make() -> tuple[Any, Any]:
        sampler: Any = DistributedSampler(range(8), num_replicas=1, rank=0, seed=3)
        return sampler, loader_of(Augmented(8), batch_size=2, sampler=sampler)

    sampler, loader = make()
    tracker = follow(loader)
    sampler.set_epoch(2)
    passage = iter(loader)
    next(passage)
    state = tracker.state()
    sampler, second = make()
    resume(second, state)
    sampler.set_epoch(0)
    assert indices(second) == indices(passage)
    assert "set_epoch" not in caplog.text
    sampler.set_epoch(then)
    list(second)
    assert ("set_epoch(0) was called, but the interrupted pass was of epoch 2" in caplog.text) == warned


def test_replayed_batches_of_an_iterable_dataset_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    loader = loader_of(Stream(8), batch_size=2)
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    next(passage)
    second = loader_of(Stream(8), batch_size=2)
    resume(second, tracker.state())
    assert len(list(second)) == 2
    assert "replaying and discarding its first 2 batches" in caplog.text


def test_workers_that_finish_in_any_order_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    if "in_order" not in DataLoader.__init__.__annotations__:
        pytest.skip("this torch has no in_order")
    loader = loader_of(Augmented(), num_workers=2, in_order=False)
    tracker = follow(loader)
    with torch.no_grad():
        assert list(loader)
    assert not tracker.doubts and "in_order" not in caplog.text
    assert list(loader)
    assert "in_order=False" in tracker.doubts.because and caplog.text.count("in_order=False") == 1


def test_torchs_default_generator_given_to_the_loader_belongs_to_the_process() -> None:
    loader = loader_of(Augmented(8), batch_size=2, shuffle=True, generator=torch.default_generator)
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    assert tracker.state()["generators"] == ()


def test_an_envelope_pins_its_batch() -> None:
    class Batch:
        def pin_memory(self) -> str:
            return "pinned"

    pinned = data_workers.Envelope(Batch(), 1, data_workers.Report((b"t", None, None))).pin_memory()
    assert (pinned.batch, pinned.worker, pinned.report.parts) == ("pinned", 1, (b"t", None, None))


def test_an_iterator_that_could_not_be_made_leaves_the_position_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = shuffled()
    tracker = follow(loader)
    passage = iter(loader)
    next(passage)
    second = shuffled(num_workers=1)
    follower = resume(second, tracker.state())
    before = harness.digest_rng(second)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(torch.multiprocessing, "Process", refuse)
        with pytest.raises(OSError, match="no more processes"):
            iter(second)
    assert harness.digest_rng(second) == before
    assert follower.delivered == 1
    assert indices(second) == indices(passage)


@pytest.mark.parametrize(
    "wrong", [{}, {"kind": "stateful-loader", "version": 1}, {"kind": "loader", "version": 99}]
)
def test_a_position_of_another_kind_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.MismatchError, match="saved data position"):
        follow(shuffled()).load(wrong)


def test_only_loaders_are_followed() -> None:
    assert data.is_loader(shuffled())
    assert not data.is_loader([1, 2])
    with pytest.raises(errors.StateError, match=r"builtins\.list is not a data loader"):
        data.track([1, 2])


def test_a_torch_whose_iterators_are_made_differently_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_iterators, "_Multi", object)
    with pytest.raises(errors.StateError, match="no _reset, _next_index"):
        data.track(shuffled())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinning needs a CUDA device")
def test_pinned_batches_come_back_pinned_and_the_same() -> None:
    def make() -> Any:
        return loader_of(Augmented(11), batch_size=3, shuffle=True, num_workers=2, pin_memory=True)

    assert harness.interrupted(make, 2, [("batch", 2), ("batch", 5)]) == harness.reference(make, 2)
    loader = make()
    follow(loader)
    assert all(batch[0].is_pinned() for batch in loader)
