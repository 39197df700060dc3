"""The phases of a notice: the table of changes, the one function that makes them, and two threads that want
different ones."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from helpers.ranks.thread_ranks import PATIENCE, at_once
from lastcall.core.notice.phases import ALLOWED, CONCLUDED, OPEN, Phase, Phases

P = Phase
PAIRS = list(itertools.product(Phase, Phase))
ENDS = {P.LEAVING, P.DISMISSED}


def at(phase: Phase, told: list[tuple[str, dict[str, object]]] | None = None) -> Phases:
    """Phases that have come to this one by allowed changes."""
    made = Phases(lambda kind, **facts: None if told is None else told.append((kind, facts)))
    for step in way_to(phase):
        made.enter(step)
    if told is not None:
        told.clear()
    return made


def way_to(phase: Phase) -> tuple[Phase, ...]:
    """The shortest way from QUIET."""
    ways: dict[Phase, tuple[Phase, ...]] = {P.QUIET: ()}
    todo = [P.QUIET]
    for here in todo:
        for there in sorted(ALLOWED[here], key=lambda each: each.value):
            if there not in ways:
                ways[there] = (*ways[here], there)
                todo.append(there)
    return ways[phase]


# ---- the table ---------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_phase() -> None:
    assert set(ALLOWED) == set(Phase)


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_is_reachable_from_quiet(phase: Phase) -> None:
    assert at(phase).phase is phase


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_leads_to_an_end(phase: Phase) -> None:
    reached, todo = {phase}, [phase]
    for here in todo:
        todo.extend(ALLOWED[here] - reached)
        reached |= ALLOWED[here]
    assert reached & ENDS


def test_no_phase_leads_to_itself() -> None:
    assert all(phase not in ALLOWED[phase] for phase in Phase)


def test_nothing_follows_an_end() -> None:
    assert {phase for phase in Phase if not ALLOWED[phase]} == ENDS


def test_only_a_save_or_the_find_of_one_is_followed_by_committed() -> None:
    """From BOUNDARY and INSTANT: another rank has committed it. From FAILED: the ranks gave up on what was
    committed all the same."""
    before = {phase for phase in Phase if P.COMMITTED in ALLOWED[phase]}
    assert before == {P.SAVING, P.SAVING_ASIDE, P.BOUNDARY, P.INSTANT, P.FAILED}


def test_the_agent_saves_aside_only_where_the_boundary_is_given_up() -> None:
    assert {phase for phase in Phase if P.SAVING_ASIDE in ALLOWED[phase]} == {P.INSTANT}


def test_only_what_is_answered_may_leave_or_become_quiet() -> None:
    for end in (P.LEAVING, P.QUIET):
        assert {phase for phase in Phase if end in ALLOWED[phase]} == {P.COMMITTED, P.FAILED}


def test_training_is_looked_at_from_holding_on_and_not_where_it_is_dismissed() -> None:
    assert set(Phase) - OPEN == {P.QUIET, P.WAITING, P.DISMISSED}
    for phase in Phase:
        assert at(phase).open is (phase in OPEN)


def test_what_is_concluded_has_been_committed_or_given_up_or_has_ended() -> None:
    assert {P.COMMITTED, P.FAILED, P.LEAVING, P.DISMISSED} == CONCLUDED
    for phase in Phase:
        assert at(phase).concluded is (phase in CONCLUDED)


# ---- one change --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair[1] in ALLOWED[pair[0]]])
def test_an_allowed_change_is_made_and_told_once(before: Phase, after: Phase) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    phases = at(before, told)
    assert phases.try_enter(after, "a reason")
    assert (phases.phase, phases.because) == (after, "a reason")
    assert told == [("phase", {"phase": after.value, "because": "a reason"})]


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair[1] not in ALLOWED[pair[0]]])
def test_a_change_that_is_not_in_the_table_is_refused_and_leaves_everything_as_it_is(
    before: Phase, after: Phase
) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    phases = at(before, told)
    because = phases.because
    assert not phases.try_enter(after, "a reason")
    with pytest.raises(RuntimeError, match=f"cannot go from {before} to {after}"):
        phases.enter(after, "a reason")
    assert (phases.phase, phases.because, told) == (before, because, [])


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair[1] in ALLOWED[pair[0]]])
def test_only_from_refuses_what_the_table_allows(before: Phase, after: Phase) -> None:
    phases = at(before)
    assert not phases.try_enter(after, only_from=set(Phase) - {before})
    assert not phases.try_enter(after, only_from=())
    assert phases.phase is before
    assert phases.try_enter(after, only_from={before})


def test_only_from_allows_nothing_that_the_table_refuses() -> None:
    phases = at(P.SAVING)
    assert not phases.try_enter(P.SAVING_ASIDE, only_from={P.SAVING})
    assert phases.phase is P.SAVING


def test_a_change_without_a_reason_forgets_the_last_one() -> None:
    phases = Phases()
    phases.enter(P.WAITING, "SIGTERM")
    phases.enter(P.HOLDING)
    assert phases.because == ""


def test_events_have_the_order_of_the_changes_whichever_thread_makes_them() -> None:
    """The event is told before another thread can make the next change."""
    order: list[str] = []
    second = threading.Event()

    def emit(kind: str, **facts: object) -> None:
        if facts["phase"] == "waiting":
            thread.start()
            assert second.wait(PATIENCE)  # the other thread is about to change it, too
        order.append(str(facts["phase"]))

    def other() -> None:
        second.set()
        phases.enter(P.HOLDING)

    thread = threading.Thread(target=other)
    phases = Phases(emit)
    phases.enter(P.WAITING)
    thread.join(PATIENCE)
    assert order == ["waiting", "holding"]


# ---- waits -------------------------------------------------------------------------------------------------


def test_a_wait_ends_at_once_where_the_phase_is_another() -> None:
    assert at(P.BOUNDARY).wait_while({P.HOLDING, P.SAVING_ASIDE}) is P.BOUNDARY


def test_a_wait_ends_with_its_time() -> None:
    phases = at(P.HOLDING)
    assert phases.wait_while({P.HOLDING}, 0.0) is P.HOLDING
    assert not phases.wait_closed(0.0)


def test_a_wait_goes_on_from_one_of_its_phases_to_the_next_and_ends_with_the_first_other() -> None:
    phases = at(P.HOLDING)
    found: list[Phase] = []
    waits = threading.Thread(
        target=lambda: found.append(phases.wait_while({P.HOLDING, P.BOUNDARY}, PATIENCE))
    )
    waits.start()
    for phase in (P.BOUNDARY, P.HOLDING, P.BOUNDARY, P.SAVING):
        phases.enter(phase)
    waits.join(PATIENCE)
    assert found == [P.SAVING]


def test_the_end_of_the_session_ends_every_wait_and_changes_no_phase() -> None:
    phases = at(P.HOLDING)
    found: list[object] = []
    waits = [
        threading.Thread(target=lambda: found.append(phases.wait_while({P.HOLDING}))),
        threading.Thread(target=lambda: found.append(phases.wait_closed(PATIENCE))),
    ]
    for each in waits:
        each.start()
    phases.close()
    for each in waits:
        each.join(PATIENCE)
    assert set(found) == {P.HOLDING, True}
    assert phases.phase is P.HOLDING and phases.closed


def test_after_the_end_of_the_session_nothing_is_waited_for() -> None:
    phases = at(P.HOLDING)
    phases.close()
    phases.close()
    assert phases.wait_while({P.HOLDING}) is P.HOLDING
    assert phases.wait_closed(0.0)
    assert phases.try_enter(P.BOUNDARY)  # what is under way comes to its end


# ---- two threads -------------------------------------------------------------------------------------------

AGENT, TRAINER = "agent", "trainer"
SAVERS = {AGENT: P.SAVING_ASIDE, TRAINER: P.SAVING}
Change = tuple[Phase, frozenset[Phase] | None]
Log = list[tuple[str, Phase]]


def merges(first: int, second: int) -> Iterator[tuple[bool, ...]]:
    """Every order of so many steps of the one thread and so many of the other."""
    for places in itertools.combinations(range(first + second), first):
        yield tuple(place in places for place in range(first + second))


def agent_script(end: Phase) -> list[Change]:
    """The responder's changes: the boundary is given up only while nobody saves there."""
    script = [(phase, None) for phase in (P.WAITING, P.HOLDING, P.BOUNDARY)]
    return [*script, (P.INSTANT, frozenset({P.BOUNDARY})), (P.SAVING_ASIDE, None), (end, None)]


def trainer_script(end: Phase) -> list[Change]:
    return [(P.SAVING, None), (end, None), (P.LEAVING, None)]


def played(agent_end: Phase, trainer_end: Phase, *, whole: bool) -> Iterator[Log]:
    """What is granted in each interleaving of both threads, as their code acts: a save that was refused has
    no end, and who finds a whole checkpoint committed makes no other."""
    scripts = {AGENT: agent_script(agent_end), TRAINER: trainer_script(trainer_end)}
    for order in merges(len(scripts[AGENT]), len(scripts[TRAINER])):
        phases, log, saving = Phases(), Log(), dict.fromkeys(SAVERS, False)
        steps = {name: iter(script) for name, script in scripts.items()}
        for turn in order:
            who = AGENT if turn else TRAINER
            wanted, only_from = next(steps[who])
            ends = wanted in (P.COMMITTED, P.FAILED) or (who == AGENT and saving[AGENT])
            answered = whole and any(phase is P.COMMITTED for _, phase in log)
            if (ends and not saving[who]) or (wanted is P.SAVING and answered):
                continue
            if phases.try_enter(wanted, only_from=only_from):
                log.append((who, wanted))
                saving[who] = wanted is SAVERS[who]
            assert not all(saving.values()), log
        yield log


ENDINGS = list(itertools.product((P.COMMITTED, P.FAILED, P.BOUNDARY), (P.COMMITTED, P.FAILED), (True, False)))


@pytest.mark.parametrize(("agent_end", "trainer_end", "whole"), ENDINGS)
def test_however_two_threads_meet_only_a_save_that_was_granted_ends_and_leaving_is_last(
    agent_end: Phase, trainer_end: Phase, whole: bool
) -> None:
    seen = set()
    for log in played(agent_end, trainer_end, whole=whole):
        seen.add(tuple(log))
        for before, (who, phase) in itertools.pairwise([("", P.QUIET), *log]):
            if phase in (P.COMMITTED, P.FAILED):
                assert before == (who, SAVERS[who]), log
            assert before[1] is not P.LEAVING, log
    # both have had their turn
    assert {who for log in seen for who, phase in log if phase is SAVERS[who]} == {AGENT, TRAINER}


def test_however_two_threads_meet_exactly_one_whole_checkpoint_is_committed() -> None:
    for log in played(P.COMMITTED, P.COMMITTED, whole=True):
        assert [phase for _, phase in log].count(P.COMMITTED) == 1, log


def test_a_checkpoint_that_is_not_whole_may_be_followed_by_the_boundary_that_comes_late_and_by_nothing_else() -> (  # noqa: E501
    None
):
    twice = 0
    for log in played(P.COMMITTED, P.COMMITTED, whole=False):
        commits = [who for who, phase in log if phase is P.COMMITTED]
        assert commits in ([AGENT], [TRAINER], [AGENT, TRAINER]), log
        twice += len(commits) == 2
    assert twice


def test_a_rescue_that_fails_leaves_the_boundary_to_save() -> None:
    both = {(AGENT, P.SAVING_ASIDE), (TRAINER, P.SAVING)}
    logs = [log for log in played(P.BOUNDARY, P.COMMITTED, whole=True) if both <= set(log)]
    assert logs and all((TRAINER, P.COMMITTED) in log for log in logs)


def test_of_two_threads_that_want_to_save_at_once_one_is_refused() -> None:
    for wanted in itertools.permutations([P.SAVING, P.INSTANT]):
        phases = at(P.BOUNDARY)
        assert [phases.try_enter(phase, only_from={P.BOUNDARY}) for phase in wanted] == [True, False]


def test_of_two_threads_that_want_to_leave_one_does() -> None:
    phases = at(P.COMMITTED)
    assert sorted(at_once(*[partial(phases.try_enter, P.LEAVING)] * 2)) == [False, True]
