"""What a script changes on its way to the loop: between the start of its block and the loop, and at the top
of an epoch.

A resumed script goes the same way once more, with the state of the checkpoint: `scheduler.step()` at the top
of the interrupted epoch, a learning rate that is set before the loop, `model.apply(init)` inside the block.
So whatever was restored is compared where the loop begins, and what has changed since is restored once more.
Only that: of large tensors a few bytes are looked at, and none is read again that is as it was.

A script may also change what was restored on purpose (`if run.resumed: ...`). Such a change does not happen
in a fresh run: which names that one changes before its loop is part of the checkpoint, and what only a
resumed run changes is kept, and named.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from lastcall.adapters.torch.state import gradients
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.adapters.torch.subject import WRITTEN, TorchSubject
from lastcall.core.checkpoint.record import Entry
from lastcall.core.engine.writer import Engine
from lastcall.core.proof import pieces
from lastcall.core.ranks.world import World
from lastcall.core.restore import restore
from lastcall.core.subject import Loading, Stored
from lastcall.types import Source

log = logging.getLogger("lastcall")
_TOLD = 5  # names in a log line


class Prelude:
    def __init__(self, subject: TorchSubject, engine: Engine, world: World, entry: Entry | None) -> None:
        self._subject = subject
        self._engine = engine
        self._world = world
        self._entry = entry
        self._look: Callable[[Source], str] = pieces.glance if entry is not None else lambda _: ""
        self._mark: dict[str, str] | None = subject.glance(self._look)
        self._outside = True  # the loop has not begun yet
        self._thread = threading.get_ident()  # the one that trains
        self._last = False
        self._taken: object = None  # where the steps stood when the script took up a position

    @property
    def waiting(self) -> bool:
        """Whether the loop has not begun yet."""
        return self._mark is not None

    def taken(self) -> bool:
        """The script has taken up the position in its data: in a loop of its own, its steps begin here. A
        thread that reads ahead says nothing about them. What is taken up behind a step, as the loader of an
        evaluation is, belongs to the loop: False."""
        if self._entry is None or threading.get_ident() != self._thread:
            return True
        if self._taken is not None and self._taken != self._subject.stepped():
            self.end()
            return False
        self.loop_begins(final=False)
        self._taken = self._subject.stepped()
        return True

    def end(self) -> None:
        """The loop runs: nothing is restored any more."""
        self._mark = None

    def in_own_pass(self) -> None:
        """The script is inside a loop of its own: what it does at the top of a pass, it may not have done
        before its first one."""
        self._outside = False

    def loop_begins(self, *, final: bool) -> None:
        """`final`: the loop that the checkpoint was saved in, or the first one of a fresh run."""
        if self._mark is None:
            return
        now = self._subject.glance(self._look)
        changed = _changed(self._mark, now)
        self._last = final
        if final:  # parameter groups that the script has not added again on its way here
            changed |= {f"{_name(path)}.{WRITTEN}" for path in self._subject.owed}
        if self._outside:
            changed = self._sorted_out(changed, now)
        if changed and self._entry is not None:
            self._put_back(changed)
        self._outside = False
        if final or self._entry is None:
            self._mark = None

    def _sorted_out(self, changed: set[str], now: dict[str, str]) -> set[str]:
        """Those of the pieces that the script changes in every run. The others it has changed because it was
        resumed."""
        known, names = self._subject.prelude, {_name(piece) for piece in changed}
        new = sorted(names - known) if self._entry is not None and known is not None else []
        self._subject.prelude = (known or set()) | names
        if not new:
            return changed
        self._subject.doubts.add(
            f"the script has changed {_listed(new)} after the checkpoint was restored, which it did not do "
            "when the run began",
            "The change is kept. Leave it out for a run that continues as if nothing had happened.",
        )
        kept = {piece for piece in changed if _name(piece) in new}
        assert self._mark is not None
        self._mark = {
            **{piece: seen for piece, seen in self._mark.items() if piece not in kept},
            **_those(now, kept),
        }
        return changed - kept

    def _put_back(self, changed: set[str]) -> None:
        assert self._entry is not None
        subject, world = self._subject, self._world
        names = sorted({_name(piece) for piece in changed})

        def wanted(group: str, name: str) -> bool:
            piece = pieces.tensor(group, name)
            return group == gradients.GROUP or piece in changed or f"{_name(piece)}.{WRITTEN}" in changed

        again = _Again(subject.state, names, self._last)
        restore.again(self._entry, self._engine, again, wanted, world.rank if world.many else 0)
        self._mark = subject.glance(self._look)
        log.info("Restored what the script changes on its way to the loop: %s", _listed(names))


class _Again:
    """Some names of what was handed over, to be restored once more."""

    loads_by_itself = False

    def __init__(self, state: StateSet, names: list[str], last: bool) -> None:
        self._state = state
        self._names = names
        self._last = last

    def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
        return self._state.prepare_again(document, stored, self._names, last=self._last)


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    return {piece for piece in before.keys() | now.keys() if before.get(piece) != now.get(piece)}


def _those(now: Mapping[str, str], pieces: set[str]) -> dict[str, str]:
    return {piece: now[piece] for piece in pieces if piece in now}


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:_TOLD]) + (
        f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    )


def _name(piece: str) -> str:
    """The name of protect() that a piece belongs to. Waiting gradients belong to none."""
    return piece.partition(".")[0]
