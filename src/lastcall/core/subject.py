"""The protocol that an adapter fulfils: what is protected can say where it is, be captured, and be restored.

Everything that the core asks of an adapter is declared here. Methods that side threads call say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from lastcall.formats import safetensors
from lastcall.types import Capture

Boundary = tuple[int, int]  # completed steps and epochs: what tells one boundary from another
Stored = Mapping[str, Mapping[str, safetensors.Stored]]  # by group and tensor name
# a Target for the whole tensor, a Region of it, or an object with several as `targets`
Targets = Mapping[str, Mapping[str, object]]


class Loading(Protocol):
    """A restore in progress: everything fits; bytes go to `targets` (group, tensor name), then `finish`
    applies the rest."""

    @property
    def whole(self) -> bool:
        """Whether a framework reads the rest of the files itself: then every byte is checked here."""

    @property
    def saved_step(self) -> int | None:
        """The step that the state says it is of, which must be the record's; None where it does not say."""

    @property
    def targets(self) -> Targets: ...

    def finish(self) -> None: ...


class Restorable(Protocol):
    @property
    def loads_by_itself(self) -> bool:
        """Whether a framework reads the checkpoint's files itself, also those of checkpoints without a
        record."""

    def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
        """Check that the checkpoint fits, without changing anything. MismatchError if it does not."""


class Subject(Restorable, Protocol):
    """What is being protected: the adapter's side of a session."""

    # ---- where it is ---------------------------------------------------------------------------------------

    @property
    def step(self) -> int: ...

    @property
    def boundary(self) -> Boundary:
        """What tells one boundary from another: the completed steps, and the completed epochs of a loop that
        counts them. A Trainer's does not: where one of its epochs ends is the boundary of the last step."""

    @property
    def ordinal(self) -> int:
        """The number of this boundary: every completed step and every epoch of `boundary` is one."""

    @property
    def settled(self) -> bool:
        """Whether no optimizer has completed a step since the last boundary."""

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes, as far as is known."""

    def numbers(self) -> dict[str, float]:
        """The metrics that were reported last."""

    # ---- what it holds -------------------------------------------------------------------------------------

    def capture(self) -> Capture:
        """The whole state, at a boundary, on the training thread."""

    def outline(self) -> Capture:
        """As capture(), for the plan and the proof. Where a framework writes the files, nothing of it runs:
        the same tensors, and about the same size."""

    def rescue(self) -> Capture:
        """The last completed step, from a side thread, with the gate closed. Between a mutation and its
        boundary, what there is, and not exact."""

    def behind_gate(self) -> Capture:
        """This boundary, with a copy of all that changes outside a mutation: it stays true for as long as the
        gate is shut."""

    def untouched(self) -> bool:
        """Whether nothing has changed the state since the last boundary, as far as can be told."""

    def unrescuable(self) -> str:
        """Why a rescue must not be tried; empty if it may."""

    # ---- what it is asked, from side threads ---------------------------------------------------------------

    def copy_every_boundary(self) -> None:
        """A notice has come: keep the boundary copy current, whatever it costs."""

    def retry_copy(self) -> None:
        """Called a few times a second: the boundary copy may have become affordable. Saves every step from
        reading the clock."""

    def stop_at_next_boundary(self) -> None:
        """Let the training thread call Session.at_boundary at its next boundary. Asked while it is at one, it
        means the one after."""

    # ---- many ranks ----------------------------------------------------------------------------------------

    def join(self, run: str, incarnation: int, folder: Path) -> None:
        """The ranks have begun: keep in `folder` what the others must know of this one if it is killed."""

    def holdings(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same pieces of the shared state, for each kind of piece."""

    def unreplicated_digest(self) -> str:
        """A digest of what is not shared, as far as is known, and would be lost with this rank; empty if
        nothing would."""

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        """What a rank that was killed would have saved as its own, as far as it is known; `mine` is this
        rank's capture."""
