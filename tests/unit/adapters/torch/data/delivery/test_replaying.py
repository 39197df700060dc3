"""What is replayed on a resume: announced, with an estimate, and shown while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lastcall.adapters.torch.data import loaders
from lastcall.adapters.torch.data.delivery import replaying


def test_g13_a_long_replay_says_beforehand_how_long_it_takes_and_shows_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    clock = iter(range(0, 10_000, 2))  # two seconds a batch
    drawn: list[int] = []
    replaying.replay("a stream", 10, 300.0, lambda: drawn.append(1), now=lambda: float(next(clock)))
    lines = [record.getMessage() for record in caplog.records]
    assert len(drawn) == 10
    assert lines[0] == "a stream: replaying and discarding its first 10 batches, which took 5 min last time"
    assert lines[1] == "a stream: 3 of 10 batches replayed, about 14 s left"
    assert len(lines) == 4


def test_g13_one_that_ends_too_early_says_how_many_there_were() -> None:
    assert replaying.replay("a stream", 5, 0.0, iter([1, 2]).__next__) == 2


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(8.0)


def test_g13_the_time_that_the_batches_took_is_part_of_the_position() -> None:
    loader = DataLoader(Stream(), batch_size=2)
    tracker = loaders.LoaderTracker(loader)
    tracker.attach()
    passage = iter(loader)
    next(passage)
    next(passage)
    assert float.fromhex(tracker.state()["seconds"] or "0x0p+0") >= 0.0
    latest = tracker.ledger.latest
    assert latest is not None and latest.seconds > 0.0


def test_g13_a_pass_that_has_become_costly_says_what_a_resume_would_cost_before_there_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lastcall")
    loader = DataLoader(Stream(), batch_size=2)
    tracker = loaders.LoaderTracker(loader)
    tracker.attach()
    batches = iter(loader)
    next(batches)
    passage = tracker.ledger.latest
    assert passage is not None and passage.costly == 30.0 and not caplog.records
    passage.seconds = 45.0
    next(batches)
    next(batches)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "would read the first 2 batches of `Stream` again, which has taken 45 s so far" in said
