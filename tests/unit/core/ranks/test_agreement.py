from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest

from lastcall import clock, errors
from lastcall.core.ranks import election
from lastcall.core.ranks.agreement import Agreement
from lastcall.core.ranks.election import Decision, Position
from lastcall.core.store import Scoped, memory

CLOCK = clock.Clock()
T = TypeVar("T")


def far() -> float:
    return CLOCK.now() + 60


@pytest.fixture
def store() -> memory.MemoryStore:
    return memory.MemoryStore()


def member(store: memory.MemoryStore, rank: int, size: int) -> Agreement:
    return Agreement(Scoped(store.clone(), "run/1/"), rank, size, CLOCK)


def everybody(store: memory.MemoryStore, size: int) -> list[Agreement]:
    return [member(store, rank, size) for rank in range(size)]


def boundary(size: int) -> Callable[[dict[int, Position]], Decision]:
    return lambda positions: election.boundary(positions, size)


def at_once(*work: Callable[[], T]) -> list[T]:
    """All of them, each in a thread."""
    with ThreadPoolExecutor(len(work)) as pool:
        futures: list[Future[T]] = [pool.submit(one) for one in work]
        return [future.result(60) for future in futures]


def each(members: list[Agreement], work: Callable[[Agreement], T]) -> list[T]:
    return at_once(*(partial(work, one) for one in members))


def agreed(members: list[Agreement], steps: list[int], until: Callable[[], float] = far) -> list[Decision]:
    at = {one.rank: Position(one.rank, step) for one, step in zip(members, steps, strict=True)}
    return each(members, lambda one: one.agree("boundary", at[one.rank], boundary(one.size), until()))


def at_the_instant(one: Agreement, dead: set[int]) -> Decision:
    """Of a DDP run: everybody holds everything."""
    holdings = {0: [tuple(range(one.size))]}
    position = Position(one.rank, 5, entered=5)
    return one.agree(
        "instant", position, lambda found: election.instant(found, one.size, holdings), far(), lambda: dead
    )


# ---- decisions ---------------------------------------------------------------------------------------------


def test_all_ranks_obey_one_decision(store: memory.MemoryStore) -> None:
    decisions = agreed(everybody(store, 8), [5, 6, 6, 5, 6, 5, 5, 6])
    assert len(set(decisions)) == 1
    assert (decisions[0].kind, decisions[0].step, decisions[0].writers) == ("boundary", 7, tuple(range(8)))
    assert decisions[0].token


def test_one_rank_agrees_with_itself(store: memory.MemoryStore) -> None:
    (decision,) = agreed(everybody(store, 1), [3])
    assert (decision.kind, decision.step) == ("boundary", 4)


def test_only_the_rank_that_completes_the_counter_reads_the_positions(store: memory.MemoryStore) -> None:
    agreed(everybody(store, 8), [5] * 8)
    assert store.traffic.operations["get_many"] == 1


def test_after_the_time_is_up_a_decision_is_made_from_what_is_there(store: memory.MemoryStore) -> None:
    members = everybody(store, 3)
    decisions = agreed(members[:2], [5, 5], until=lambda: CLOCK.now() + 0.05)
    assert decisions[0] == decisions[1]
    assert (decisions[0].kind, decisions[0].missing) == ("nothing", (2,))


def test_a_late_rank_obeys_the_decision(store: memory.MemoryStore) -> None:
    members = everybody(store, 3)
    early = agreed(members[:2], [5, 5], until=CLOCK.now)
    late = agreed(members[2:], [5])
    assert late == early[:1]


def test_nobody_waits_for_the_dead(store: memory.MemoryStore) -> None:
    members = everybody(store, 3)
    decisions = each([members[0], members[2]], lambda one: at_the_instant(one, {1}))
    assert decisions[0] == decisions[1]
    assert (decisions[0].kind, decisions[0].writers, decisions[0].missing) == ("survivors", (0, 2), (1,))


def test_what_a_rank_said_before_it_died_does_not_make_it_a_writer(store: memory.MemoryStore) -> None:
    members = everybody(store, 2)
    members[1]._publish(members[1]._key("instant"), Position(1, 5, entered=5).to_bytes())
    decision = at_the_instant(members[0], {1})
    assert (decision.kind, decision.writers, decision.missing) == ("survivors", (0,), (1,))


def test_a_dead_rank_does_not_hide_a_living_one_that_is_missing(store: memory.MemoryStore) -> None:
    members, looked = everybody(store, 3), threading.Event()
    members[1]._publish(members[1]._key("boundary"), Position(1, 5).to_bytes())

    def dead() -> set[int]:
        looked.set()
        return {1}

    def last() -> Decision:
        looked.wait(60)
        return members[2].agree("boundary", Position(2, 6), boundary(3), far())

    first, second = at_once(
        lambda: members[0].agree("boundary", Position(0, 5), boundary(3), far(), dead), last
    )
    assert first == second
    assert 2 not in first.missing


def test_a_rank_that_was_counted_twice_does_not_stand_for_another(store: memory.MemoryStore) -> None:
    members = everybody(store, 2)
    store.add("run/1/1/boundary/count", 1)
    decision = members[0].agree("boundary", Position(0, 5), boundary(2), CLOCK.now())
    assert (decision.kind, decision.missing) == ("nothing", (1,))


@pytest.mark.parametrize("said", [b"garbage", Position(0, 9).to_bytes()])
def test_a_rank_that_said_nothing_sensible_is_missing(store: memory.MemoryStore, said: bytes) -> None:
    members = everybody(store, 2)
    members[1]._publish(members[1]._key("boundary"), said)
    decision = members[0].agree("boundary", Position(0, 5), boundary(2), far())
    assert (decision.kind, decision.missing) == ("nothing", (1,))


def test_a_decision_that_fails_is_an_abort_for_all(store: memory.MemoryStore) -> None:
    def fail(positions: dict[int, Position]) -> Decision:
        raise ZeroDivisionError("odd")

    members = everybody(store, 2)
    decisions = each(members, lambda one: one.agree("boundary", Position(one.rank, 5), fail, far()))
    assert decisions[0] == decisions[1]
    assert (decisions[0].kind, decisions[0].because) == (
        "abort",
        "could not make a decision: ZeroDivisionError: odd",
    )


def test_a_rank_that_loses_the_store_is_alone(store: memory.MemoryStore) -> None:
    waiting = threading.Event()

    class Told(Scoped):
        def get(self, key: str, timeout: float) -> bytes | None:
            waiting.set()
            return super().get(key, timeout)

    agreement = Agreement(Told(store.clone(), "run/1/"), 1, 3, CLOCK)

    def lose() -> None:
        waiting.wait(60)
        store.lose()

    decision, _ = at_once(
        lambda: agreement.agree("boundary", Position(1, 5, entered=4), boundary(3), far()), lose
    )
    assert decision is not None
    assert (decision.kind, decision.step, decision.entered, decision.writers, decision.missing) == (
        "alone",
        5,
        4,
        (1,),
        (0, 2),
    )
    assert "the store is lost" in decision.because


def test_each_phase_and_each_round_has_a_decision_of_its_own(store: memory.MemoryStore) -> None:
    members = everybody(store, 2)
    first = agreed(members, [5, 5])
    second = agreed([one.round(2) for one in members], [9, 9])
    assert (first[0].step, second[0].step) == (6, 10)
    assert first[0].token != second[0].token


def test_incarnations_do_not_see_each_other(store: memory.MemoryStore) -> None:
    agreed(everybody(store, 2), [5, 5])
    other = [Agreement(Scoped(store.clone(), "run/2/"), rank, 2, CLOCK) for rank in range(2)]
    assert agreed(other, [9, 9])[0].step == 10


# ---- news --------------------------------------------------------------------------------------------------


def test_the_first_announcement_counts_and_everybody_hears_it(store: memory.MemoryStore) -> None:
    members = everybody(store, 3)
    members[1].announce({"reason": "SIGTERM", "deadline": 100.0})
    members[2].announce({"reason": "spot", "deadline": 100.0})
    for member_ in members:
        assert member_.heard(60) == {"reason": "SIGTERM", "deadline": 100.0}
        assert member_.heard(0) is None


def test_a_listener_wakes_on_the_announcement(store: memory.MemoryStore) -> None:
    listener, speaker = everybody(store, 2)
    heard, _ = at_once(lambda: listener.heard(60), lambda: speaker.announce({"reason": "SIGTERM"}))
    assert heard == {"reason": "SIGTERM"}


def test_a_later_announcement_can_only_shorten_the_deadline(store: memory.MemoryStore) -> None:
    members = everybody(store, 2)
    for deadline in (None, 100.0, 99.5, 200.0, None, 50.0, 60.0):
        members[0].announce({"deadline": deadline})
    heard = [members[1].heard(0) for _ in range(4)]
    assert heard == [{"deadline": None}, {"deadline": 100.0}, {"deadline": 50.0}, None]


def test_an_announcement_that_cannot_be_read_is_one_all_the_same(store: memory.MemoryStore) -> None:
    store.set("run/1/1/news/1", b"\xff")
    assert member(store, 0, 2).heard(0) == {}


def test_a_new_round_hears_new_announcements_only(store: memory.MemoryStore) -> None:
    one, two = everybody(store, 2)
    one.announce({"reason": "hang"})
    assert two.heard(0) == {"reason": "hang"}
    assert two.round(2).heard(0) is None
    one.round(2).announce({"reason": "SIGTERM"})
    assert two.round(2).heard(0) == {"reason": "SIGTERM"}


def test_what_is_told_is_waited_for(store: memory.MemoryStore) -> None:
    one, two = everybody(store, 2)
    assert two.wait_for("restore", 0) is None
    told, _ = at_once(lambda: two.wait_for("restore", 60), lambda: one.tell("restore", {"step": 7}))
    assert told == {"step": 7}


def test_a_closed_connection_ends_a_listener_but_not_its_clone(store: memory.MemoryStore) -> None:
    agreement = member(store, 0, 2)
    other = agreement.clone()
    agreement.close()
    with pytest.raises(errors.StoreLost):
        agreement.heard(60)
    assert other.heard(0) is None


# ---- votes -------------------------------------------------------------------------------------------------


def test_a_vote_is_carried_by_everybody(store: memory.MemoryStore) -> None:
    verdicts = each(everybody(store, 4), lambda one: one.vote("loaded", True, "", far()))
    assert all(verdict.ok and not verdict.lost for verdict in verdicts)


def test_one_no_is_enough_and_everybody_knows_why(store: memory.MemoryStore) -> None:
    members = everybody(store, 3)
    verdicts = each(members, lambda one: one.vote("loaded", one.rank != 2, "checksum", far()))
    assert all(not verdict.ok and verdict.reasons == {2: "checksum"} for verdict in verdicts)
    assert verdicts[0].because == "rank 2: checksum"


def test_whoever_does_not_vote_in_time_has_said_no(store: memory.MemoryStore) -> None:
    verdict = member(store, 0, 3).vote("loaded", True, "", CLOCK.now())
    assert verdict.reasons == {1: "did not answer in time", 2: "did not answer in time"}


@pytest.mark.parametrize("said", [b"garbage", b"{}", b'{"ok": 1}'])
def test_a_vote_that_cannot_be_read_is_a_no(store: memory.MemoryStore, said: bytes) -> None:
    members = everybody(store, 2)
    members[1]._publish(members[1]._key("vote/loaded"), said)
    assert members[0].vote("loaded", True, "", far()).reasons == {1: "no"}


def test_a_vote_without_a_store_is_lost(store: memory.MemoryStore) -> None:
    agreement = member(store, 0, 2)
    store.lose()
    verdict = agreement.vote("loaded", True, "", far())
    assert (verdict.ok, verdict.lost) == (False, True)


def test_the_result_of_a_vote_does_not_grow_with_the_ranks(store: memory.MemoryStore) -> None:
    verdict = member(store, 0, 1000).vote("loaded", True, "", CLOCK.now())
    assert len(verdict.reasons) == 64


def test_a_decision_of_any_content_is_made_once_from_what_all_have_said(store: memory.MemoryStore) -> None:
    members = everybody(store, 3)
    found = each(
        members,
        lambda one: one.settle(
            "step", {"step": one.rank}, lambda said: {"step": max(w["step"] for w in said.values())}, far()
        ),
    )
    assert found == [{"step": 2}] * 3


def test_a_rank_that_is_dead_has_no_say_in_a_decision(store: memory.MemoryStore) -> None:
    members = everybody(store, 3)[:2]
    found = each(
        members,
        lambda one: one.settle(
            "who", {"rank": one.rank}, lambda said: {"ranks": sorted(said)}, far(), lambda: {2}
        ),
    )
    assert found == [{"ranks": [0, 1]}] * 2


def test_a_decision_that_cannot_be_made_is_empty_on_all_ranks(store: memory.MemoryStore) -> None:
    found = each(everybody(store, 2), lambda one: one.settle("bad", {}, lambda said: {"no": 1 // 0}, far()))
    assert found == [{}, {}]


def test_nothing_is_settled_where_the_store_is_lost(store: memory.MemoryStore) -> None:
    one = member(store, 0, 2)
    one.close()
    assert one.settle("step", {}, lambda said: {}, far()) is None
