from __future__ import annotations

import dataclasses

import pytest

from lastcall.core.ranks import election
from lastcall.core.ranks.election import Decision, Position

DDP = {0: [(0, 1, 2, 3)]}
FSDP = {rank: [(rank,)] for rank in range(4)}
HSDP = {0: [(0, 2)], 1: [(1, 3)], 2: [(0, 2)], 3: [(1, 3)]}


def ranks(*positions: Position) -> dict[int, Position]:
    return {position.rank: position for position in positions}


def after(*entered: int) -> dict[int, Position]:
    """Ranks in the middle of a step, with so many optimizer steps behind them."""
    return ranks(*(Position(rank, count, entered=count) for rank, count in enumerate(entered)))


# ---- the boundary ------------------------------------------------------------------------------------------


def test_the_boundary_is_the_first_that_nobody_has_passed() -> None:
    decision = election.boundary(ranks(Position(0, 7), Position(1, 6), Position(2, 7, parked=True)), 3)
    assert (decision.kind, decision.step, decision.writers, decision.missing) == (
        "boundary",
        8,
        (0, 1, 2),
        (),
    )
    assert decision.because == "no rank is past it, 3 of 3 ranks are on their way"


def test_ranks_that_all_wait_at_one_boundary_save_there() -> None:
    decision = election.boundary(ranks(Position(0, 7, parked=True), Position(1, 7, parked=True)), 2)
    assert (decision.kind, decision.step) == ("boundary", 7)
    assert "all wait there" in decision.because


def test_a_notice_before_the_first_step_is_saved_at_the_first_boundary() -> None:
    assert election.boundary(ranks(Position(0, 0), Position(1, 0)), 2).step == 1
    assert election.boundary(ranks(Position(0, 0, parked=True), Position(1, 0, parked=True)), 2).step == 0


def test_ranks_many_steps_apart_meet_at_the_furthest() -> None:
    decision = election.boundary(ranks(Position(0, 3), Position(1, 90, parked=True), Position(2, 0)), 3)
    assert (decision.kind, decision.step) == ("boundary", 90)


def test_a_finished_rank_contributes_its_final_state() -> None:
    decision = election.boundary(ranks(Position(0, 10, finished=True), Position(1, 9)), 2, {0: [(0, 1)]})
    assert (decision.kind, decision.step, decision.writers, decision.missing) == ("boundary", 10, (0, 1), ())


def test_a_rank_that_finished_at_another_step_writes_nothing_that_others_hold() -> None:
    positions = ranks(Position(0, 8, finished=True), Position(1, 9), Position(2, 9))
    shared = election.boundary(positions, 3, {0: [(0, 1, 2)]})
    assert (shared.step, shared.writers, shared.missing) == (10, (1, 2), (0,))
    assert "rank 0 finished at another step" in shared.because
    assert election.boundary(positions, 3, {rank: [(rank,)] for rank in range(3)}).writers == (0, 1, 2)


def test_when_all_have_finished_there_is_nothing_to_interrupt() -> None:
    finished = ranks(Position(0, 10, finished=True), Position(1, 10, finished=True))
    assert election.boundary(finished, 2).kind == "finish"
    assert election.instant(finished, 2, DDP).kind == "finish"
    assert election.survivors(finished, 2, DDP).kind == "finish"


def test_no_boundary_is_agreed_on_without_every_rank() -> None:
    decision = election.boundary(ranks(Position(0, 7), Position(2, 7)), 4)
    assert (decision.kind, decision.missing, decision.writers) == ("nothing", (1, 3), ())
    assert decision.because == "ranks 1 and 3 did not say where they are"
    assert election.boundary({}, 1).kind == "nothing"


@pytest.mark.parametrize("how", [{"clean": False}, {"stopped": True}])
def test_no_boundary_is_agreed_on_with_a_rank_that_cannot_reach_it(how: dict[str, bool]) -> None:
    decision = election.boundary(
        ranks(Position(0, 7), Position(1, 7, because="ValueError: bad batch", **how)), 2
    )
    assert decision.kind == "nothing"
    assert decision.because == "rank 1 cannot continue: ValueError: bad batch"


# ---- the instant -------------------------------------------------------------------------------------------


def test_the_instant_is_the_last_optimizer_step_that_any_rank_completed() -> None:
    decision = election.instant(after(5, 5, 4, 5), 4, DDP)
    assert (decision.kind, decision.entered, decision.step, decision.writers) == (
        "instant",
        5,
        5,
        (0, 1, 2, 3),
    )
    assert "rank 2 is finishing it" in decision.because


def test_ranks_at_one_optimizer_step_are_together_on_both_sides_of_its_boundary() -> None:
    positions = ranks(Position(0, 5, entered=5), Position(1, 4, entered=5))
    decision = election.instant(positions, 2, DDP)
    assert (decision.kind, decision.entered, decision.step) == ("instant", 5, 5)
    assert "all ranks have" in decision.because


def test_equal_steps_with_different_optimizer_steps_are_told_apart() -> None:
    decision = election.instant(ranks(Position(0, 4, entered=9), Position(1, 4, entered=8)), 2, DDP)
    assert (decision.kind, decision.entered, decision.step) == ("instant", 9, 4)
    assert "rank 1 is finishing it" in decision.because


def test_a_run_without_optimizer_hooks_goes_by_its_steps() -> None:
    decision = election.instant(ranks(Position(0, 4), Position(1, 3)), 2, DDP)
    assert (decision.kind, decision.step, decision.entered) == ("instant", 4, 0)
    assert "rank 1 is finishing it" in decision.because


def test_what_is_committed_is_not_saved_again_whoever_knows_of_it() -> None:
    decision = election.instant(
        ranks(Position(0, 7, entered=7), Position(1, 7, entered=7, kept=True)), 2, {0: [(0, 1)]}
    )
    assert (decision.kind, decision.step, decision.kept) == ("instant", 7, True)
    assert "was begun before" in decision.because
    alone = election.instant(ranks(Position(1, 7, entered=7, kept=True)), 2, {0: [(0, 1)]})
    assert (alone.kind, alone.missing, alone.kept) == ("survivors", (0,), True)


def test_a_checkpoint_that_all_ranks_are_writing_is_not_begun_a_second_time() -> None:
    both = ranks(Position(0, 7, entered=7, keeping=True), Position(1, 7, entered=7, keeping=True))
    assert election.instant(both, 2, {0: [(0, 1)]}).kept
    assert not election.instant(both | ranks(Position(1, 7, entered=7)), 2, {0: [(0, 1)]}).kept
    # it needs the part of a rank that is lost
    assert not election.instant(ranks(both[0]), 2, {0: [(0, 1)]}).kept


def test_a_committed_step_is_not_what_is_saved_where_a_rank_has_stepped_since() -> None:
    positions = ranks(Position(0, 7, entered=7, kept=True), Position(1, 7, entered=8, exact=False))
    assert not election.instant(positions, 2, {0: [(0, 1)]}).kept


def test_with_a_rank_lost_nobody_is_let_through() -> None:
    positions = after(5, 4, 5, 5)
    del positions[3]
    decision = election.instant(positions, 4, DDP)
    assert (decision.kind, decision.entered, decision.writers, decision.missing) == (
        "survivors",
        5,
        (0, 2),
        (1, 3),
    )
    assert (
        decision.because
        == "ranks 0 and 2 hold all of step 5; rank 3 did not answer; rank 1 is at an older one"
    )


def test_a_rank_behind_whose_training_failed_is_left_behind() -> None:
    positions = after(5, 4, 5, 5)
    positions[1] = dataclasses.replace(positions[1], stopped=True)
    decision = election.instant(positions, 4, DDP)
    assert (decision.kind, decision.entered, decision.missing) == ("survivors", 5, (1,))


def test_a_failed_rank_that_is_not_behind_saves_with_the_others() -> None:
    positions = after(5, 5, 4, 5)
    positions[1] = dataclasses.replace(positions[1], stopped=True)
    decision = election.instant(positions, 4, DDP)
    assert (decision.kind, decision.entered, decision.writers) == ("instant", 5, (0, 1, 2, 3))


# ---- survivors ---------------------------------------------------------------------------------------------


def test_one_survivor_of_ddp_is_enough() -> None:
    decision = election.survivors(ranks(Position(2, 9, entered=9)), 4, DDP)
    assert (decision.kind, decision.step, decision.writers, decision.missing) == (
        "survivors",
        9,
        (2,),
        (0, 1, 3),
    )


def test_a_rank_inside_an_optimizer_step_is_never_a_source() -> None:
    positions = after(9, 9, 9, 9)
    positions[0] = Position(0, 9, entered=10, clean=False, because="SIGTERM in step()")
    decision = election.survivors(positions, 4, DDP)
    assert (decision.kind, decision.entered, decision.writers, decision.missing) == (
        "survivors",
        9,
        (1, 2, 3),
        (0,),
    )
    assert "rank 0 failed inside an optimizer step" in decision.because


def test_nothing_is_saved_when_everybody_is_torn_or_gone() -> None:
    decision = election.survivors(ranks(Position(1, 9, clean=False, because="killed in step()")), 2, DDP)
    assert decision.kind == "abort"
    assert (
        decision.because
        == "no rank holds a whole state: rank 1 failed inside an optimizer step (killed in step())"
    )
    assert (
        election.survivors({}, 2, DDP).because
        == "no rank holds a whole state: no rank has reported its position"
    )


def test_one_replica_of_every_shard_is_enough_in_hsdp() -> None:
    positions = after(9, 9, 9, 9)
    del positions[0], positions[1]
    decision = election.survivors(positions, 4, HSDP)
    assert (decision.kind, decision.writers, decision.missing) == ("survivors", (2, 3), (0, 1))


def test_a_shard_without_a_replica_is_lost_with_its_rank() -> None:
    positions = after(9, 9, 9, 9)
    del positions[2]
    decision = election.survivors(positions, 4, FSDP)
    assert decision.kind == "abort"
    assert decision.because.startswith("rank 2 held the only copy of its shard; plain FSDP")
    assert "cannot be saved by survivors alone" in decision.because


def test_all_replicas_of_a_shard_may_be_lost_together() -> None:
    positions = after(9, 9, 9, 9)
    del positions[0], positions[2]
    decision = election.survivors(positions, 4, HSDP)
    assert decision.kind == "abort"
    assert decision.because.startswith(
        "ranks 0 and 2 held the only copies of a shard, and all of them are lost"
    )


def test_an_older_step_is_saved_where_the_newest_is_not_held_in_full() -> None:
    positions = after(10, 9, 9, 9)
    del positions[3]
    decision = election.survivors(positions, 4, HSDP)
    assert (decision.kind, decision.entered, decision.writers, decision.missing) == (
        "survivors",
        9,
        (1, 2),
        (0, 3),
    )


def test_shards_at_different_steps_make_no_checkpoint() -> None:
    positions = after(10, 9, 9, 9)
    del positions[2], positions[3]
    decision = election.survivors(positions, 4, HSDP)
    assert decision.kind == "abort"
    assert decision.because.startswith(
        "at step 10 a shard is missing that only rank 1 still holds, at step 9"
    )


def test_ranks_that_share_nothing_are_saved_by_whoever_is_furthest() -> None:
    decision = election.survivors(after(3, 5), 3, {})
    assert (decision.kind, decision.writers, decision.missing) == ("survivors", (1,), (0, 2))


# ---- on the wire -------------------------------------------------------------------------------------------


def test_a_position_comes_back_from_its_bytes() -> None:
    position = Position(3, 7, parked=True, entered=9, clean=False, exact=False, because="why", stopped=True)
    assert Position.from_bytes(position.to_bytes()) == position
    assert Position.from_bytes(Position(0, 0).to_bytes()) == Position(0, 0)


NO_POSITIONS = [
    None,
    b"",
    b"\xff",
    b"[]",
    b"{}",
    b"[" * 9999,
    b'{"rank": 1}',
    b'{"rank": "1", "step": 2}',
    b'{"rank": 1, "step": true}',
    b'{"rank": 1, "step": 2, "x": 3}',
]


@pytest.mark.parametrize("garbage", NO_POSITIONS)
def test_what_is_no_position_counts_as_silence(garbage: bytes | None) -> None:
    assert Position.from_bytes(garbage) is None


def test_a_decision_comes_back_from_its_bytes() -> None:
    decision = Decision("survivors", 7, 9, (0, 1, 2, 5), (3, 4), "why", "token")
    assert Decision.from_bytes(decision.to_bytes()) == decision


def test_the_size_of_a_decision_does_not_grow_with_the_ranks() -> None:
    few, many = (Decision("boundary", 7, 9, tuple(range(size))).to_bytes() for size in (10, 10_000))
    assert len(many) < len(few) + 10


NO_DECISIONS = [
    b"",
    b"7",
    b'{"kind": "boundary"}',
    b'{"kind":"odd","writers":[],"missing":[]}',
    Decision("alone").to_bytes(),
]


@pytest.mark.parametrize("garbage", NO_DECISIONS)
def test_a_decision_that_cannot_be_read_is_an_abort(garbage: bytes) -> None:
    decision = Decision.from_bytes(garbage)
    assert decision.kind == "abort"
    assert "cannot be read" in decision.because


def test_many_ranks_are_named_in_few_words() -> None:
    decision = election.survivors(ranks(Position(0, 1)), 1000, {})
    assert "ranks 1, 2, 3, 4, 5, 6, 7, ... and 999 (999 in all) did not answer" in decision.because


def test_e6_the_step_of_a_decision_is_the_same_for_all_ranks_at_the_end_of_an_epoch() -> None:
    """E6: a rank that has come to the end of the epoch counts one boundary more than one that has not; both
    are told of step 6."""
    positions = {0: Position(0, 7, parked=True, epochs=1), 1: Position(1, 6, parked=False, epochs=0)}
    decision = Decision.from_bytes(election.boundary(positions, 2).to_bytes())
    assert decision.step == 7 and decision.shown == 6
    assert decision.described() == "all save step 6" and "no rank is past step 6" in decision.because
    # the next boundary may be the epoch's end
    underway = {rank: Position(rank, 6, parked=False, epochs=0) for rank in (0, 1)}
    decision = election.boundary(underway, 2)
    assert decision.step == 7 and decision.described() == "all save at the boundary after step 6"
