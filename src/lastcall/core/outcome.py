"""The outcome of an incarnation: one owner, and the changes that it allows.

undecided -> finished, saved, not saved, failed, left
saved     -> failed (the error was the script's own), undecided (a hang was saved and training continues)
not saved -> saved (a later attempt worked), failed
finished  -> saved (the end is not in the mirror yet), not saved, failed (the final checkpoint was not saved)
"""

from __future__ import annotations

from lastcall.types import Outcome

ALLOWED: dict[Outcome | None, frozenset[Outcome | None]] = {
    None: frozenset(Outcome),
    Outcome.SAVED: frozenset({Outcome.FAILED, Outcome.FINISHED, None}),
    Outcome.NOT_SAVED: frozenset({Outcome.SAVED, Outcome.FAILED, Outcome.FINISHED, None}),
    Outcome.FINISHED: frozenset({Outcome.SAVED, Outcome.NOT_SAVED, Outcome.FAILED}),
    Outcome.FAILED: frozenset(),
    Outcome.LEFT: frozenset(),
}


class OutcomeCell:
    """Read from any thread. Every change goes through `decide`."""

    def __init__(self) -> None:
        self._value: Outcome | None = None

    @property
    def value(self) -> Outcome | None:
        return self._value

    @property
    def text(self) -> str | None:
        """For events and for the launcher."""
        return None if self._value is None else self._value.value

    @property
    def saved(self) -> bool:
        return self._value is Outcome.SAVED

    @property
    def decided(self) -> bool:
        return self._value is not None

    def decide(self, outcome: Outcome) -> None:
        self._change(outcome)

    def decide_if_open(self, outcome: Outcome) -> None:
        """For the last step of the exit: an outcome that is already known stays."""
        if self._value is None:
            self._change(outcome)

    def reopen(self) -> None:
        """A hang was answered, and training continues: this incarnation has no outcome yet."""
        self._change(None)

    def _change(self, outcome: Outcome | None) -> None:
        if outcome is not self._value and outcome not in ALLOWED[self._value]:
            raise RuntimeError(f"the outcome of a run cannot change from {self._value} to {outcome}")
        self._value = outcome
