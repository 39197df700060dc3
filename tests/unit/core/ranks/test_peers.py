from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.ranks.thread_ranks import PATIENCE, Company, Told, company
from lastcall import clock as clocks
from lastcall.core.ranks.heartbeat import HANG, LOST, Diagnosis
from lastcall.types import Notice

CLOCK = clocks.Clock()
GRACE = 30.0


class Ears:
    """What each rank is told, in order."""

    def __init__(self, run: Company) -> None:
        self.heard: list[queue.Queue[Notice]] = [queue.Queue() for _ in run.members]
        for member in run.members:
            member.ranks.begin(3600.0, lambda: (0, ""), self.heard[member.rank].put, GRACE)
            member.ranks.peers = Told(run.dead)

    def next(self, rank: int) -> Notice:
        return self.heard[rank].get(timeout=PATIENCE)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Company]:
    with company(tmp_path, 3) as made:
        yield made
        for member in made.members:
            member.ranks.close()
        made.store.lose()  # ends the ears


def notice(source: str = "signal", left: float | None = 20.0) -> Notice:
    now = CLOCK.now()
    return Notice(source, "SIGTERM", now, None if left is None else now + left, signal.SIGTERM)


def test_a_notice_of_one_rank_comes_to_all_others_with_its_deadline(run: Company) -> None:
    ears = Ears(run)
    told = notice()
    run.members[1].ranks.announce(told)
    for rank in (0, 2):
        heard = ears.next(rank)
        assert (heard.source, heard.reason, heard.signum) == ("rank 1", "SIGTERM", signal.SIGTERM)
        assert (
            heard.deadline is not None
            and told.deadline is not None
            and abs(heard.deadline - told.deadline) < 5.0
        )
    assert ears.heard[1].empty()


def test_a_notice_without_a_deadline_has_the_grace(run: Company) -> None:
    ears = Ears(run)
    run.members[0].ranks.announce(notice(left=None))
    heard = ears.next(1)
    assert heard.deadline == heard.at + GRACE


def test_only_news_that_shorten_the_deadline_are_told(run: Company) -> None:
    ears = Ears(run)
    run.members[0].ranks.announce(notice(left=20.0))
    assert ears.next(2).source == "rank 0"
    run.members[1].ranks.announce(notice(left=25.0))
    run.members[1].ranks.announce(notice(left=5.0))
    heard = ears.next(2)
    assert heard.source == "rank 1" and heard.deadline is not None and heard.deadline < CLOCK.now() + 10.0


def test_the_loss_of_a_rank_is_told_as_such(run: Company) -> None:
    ears = Ears(run)
    run.members[2].ranks.announce(notice(LOST), failed=True)
    assert ears.next(0).source == LOST
    assert run.members[0].ranks.unable() == {2}
    run.dead.add(1)
    assert (run.members[0].ranks.gone(), run.members[0].ranks.unable()) == ({1}, {1, 2})


def test_the_next_round_has_news_of_its_own(run: Company) -> None:
    ears = Ears(run)
    run.members[0].ranks.announce(notice(HANG))
    assert [ears.next(rank).source for rank in (1, 2)] == [HANG, HANG]
    for member in run.members:
        member.ranks.next_round()
    run.members[2].ranks.announce(notice())
    assert [ears.next(rank).source for rank in (0, 1)] == ["rank 2", "rank 2"]


def test_what_the_watch_finds_becomes_a_notice(run: Company, caplog: pytest.LogCaptureFixture) -> None:
    ears = Ears(run)
    ranks = run.members[0].ranks
    ranks._found(Diagnosis("silent", (1,), "rank 1 sent no heartbeat"))
    assert ears.heard[0].empty() and "rank 1 sent no heartbeat" in caplog.text
    ranks._found(Diagnosis("dead", (1,), "rank 1 is gone"))
    ranks._found(Diagnosis("frozen", (2,), "rank 2 hangs"))
    assert [(ears.next(0).source, reason) for reason in ("gone", "hangs")] == [
        (LOST, "gone"),
        (HANG, "hangs"),
    ]
    ranks.close()
    ranks._found(Diagnosis("dead", (1,), "rank 1 is gone"))
    assert ears.heard[0].empty()


def test_pieces_are_registered_once_by_their_lowest_holder(run: Company) -> None:
    for member in run.members:
        member.ranks.register(((0, 1, 2), (member.rank,)), "")
    assert run.members[2].ranks.holdings() == {0: [(0, 1, 2), (0,)], 1: [(1,)], 2: [(2,)]}


def test_ranks_whose_own_state_is_the_same_hold_it_for_each_other(run: Company) -> None:
    for member, own in zip(run.members, ("same", "other", "same"), strict=True):
        member.ranks.register((), own)
    assert run.members[0].ranks.holdings() == {0: [(0, 2)], 1: [(1,)], 2: []}


def test_nothing_registered_is_nothing_held(run: Company) -> None:
    assert run.members[0].ranks.holdings() == {0: [], 1: [], 2: []}


def test_words_of_a_save_are_heard_and_a_lost_store_is_silence(
    run: Company, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = run.members[0].ranks, run.members[1].ranks
    assert two.hear("outcome", 0.0) is None
    one.tell("outcome", {"path": "checkpoint-1"})
    assert two.hear("outcome", PATIENCE) == {"path": "checkpoint-1"}
    run.store.lose()
    one.tell("outcome", {})
    assert two.hear("outcome", PATIENCE) is None
    one.register(((0, 1),), "")
    assert not any(two.holdings().values())
    one.announce(notice())
    assert "Could not announce SIGTERM to the other ranks" in caplog.text
    one.next_round()
