"""The outcome of an incarnation: which changes it allows, and who may make them."""

from __future__ import annotations

import itertools

import pytest

from lastcall.core.outcome import ALLOWED, OutcomeCell
from lastcall.types import Outcome

O = Outcome  # noqa: E741
ALL: list[Outcome | None] = [None, *Outcome]
PAIRS = list(itertools.product(ALL, ALL))


def cell(value: Outcome | None) -> OutcomeCell:
    made = OutcomeCell()
    if value is not None:
        made.decide(value)
    return made


def change(made: OutcomeCell, outcome: Outcome | None) -> None:
    if outcome is None:
        made.reopen()
    else:
        made.decide(outcome)


def test_an_incarnation_has_no_outcome_until_one_is_decided() -> None:
    made = OutcomeCell()
    assert (made.value, made.text, made.saved, made.decided) == (None, None, False, False)


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_can_be_the_first(outcome: Outcome) -> None:
    made = cell(outcome)
    assert (made.value, made.text, made.saved, made.decided) == (
        outcome,
        outcome.value,
        outcome is O.SAVED,
        True,
    )


@pytest.mark.parametrize(
    ("before", "after"), [pair for pair in PAIRS if pair[1] in ALLOWED[pair[0]] or pair[0] is pair[1]]
)
def test_a_change_that_is_allowed_is_made_and_what_is_said_twice_stays(
    before: Outcome | None, after: Outcome | None
) -> None:
    made = cell(before)
    change(made, after)
    assert made.value is after


@pytest.mark.parametrize(
    ("before", "after"),
    [pair for pair in PAIRS if pair[1] not in ALLOWED[pair[0]] and pair[0] is not pair[1]],
)
def test_a_change_that_is_not_allowed_is_a_mistake_and_changes_nothing(
    before: Outcome | None, after: Outcome | None
) -> None:
    made = cell(before)
    with pytest.raises(RuntimeError, match=f"cannot change from {before} to {after}"):
        change(made, after)
    assert made.value is before


@pytest.mark.parametrize(("before", "outcome"), list(itertools.product(ALL, Outcome)))
def test_who_comes_last_changes_nothing_that_is_known(before: Outcome | None, outcome: Outcome) -> None:
    made = cell(before)
    made.decide_if_open(outcome)
    assert made.value is (outcome if before is None else before)


def test_the_table_is_that_of_the_changes_that_happen() -> None:
    # an error of the script's own; the end; a hang that was answered
    assert ALLOWED[O.SAVED] == {O.FAILED, O.FINISHED, None}
    assert ALLOWED[O.NOT_SAVED] == {O.SAVED, O.FAILED, O.FINISHED, None}  # a later attempt
    # the final checkpoint is not where it should be
    assert ALLOWED[O.FINISHED] == {O.SAVED, O.NOT_SAVED, O.FAILED}
    assert ALLOWED[O.FAILED] == ALLOWED[O.LEFT] == frozenset()
    assert set(ALLOWED) == set(ALL)
