"""How the ranks of a run load one checkpoint: rank 0 names one, every rank loads its part of it, and all
vote. One that finds damage makes all try the next.

A rank that is asked to stop while it waits here vetoes: the vote's register decides whether that came in
time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.record import Entry, Record
from lastcall.core.engine.writer import Engine
from lastcall.core.ranks import rendezvous
from lastcall.core.ranks.agreement import Agreement, Verdict
from lastcall.core.ranks.rendezvous import Rendezvous
from lastcall.core.ranks.world import World
from lastcall.core.restore import restore
from lastcall.core.subject import Restorable
from lastcall.core.sync.stopped import Stopped
from lastcall.core.transfer.directories import Directories
from lastcall.types import Kind

log = logging.getLogger("lastcall")
STOPPED = "asked to stop"
# how the objection of a rank that found a damaged checkpoint begins
_DAMAGE = ("CheckpointError", "PartlyLoaded")
_SPOILED = (
    "all checkpoints were damaged and have been set aside; the state in memory is partly overwritten. Start "
    "the run again to begin "
    "from scratch."
)

# has a checkpoint, known by the fingerprint of its record, in this rank's directory
Bring = Callable[[str], None]


class _Objection(Exception):
    """Another rank has found, before anything was loaded, that this checkpoint cannot be loaded."""


@dataclass
class LoadVote:
    """`check`: raises where waiting for this rank is useless. `dead`: ranks that have come and are gone."""

    _world: World
    _catalog: Catalog
    _clock: clocks.Clock
    _stop_requested: Callable[[], bool]
    _rendezvous: Rendezvous
    _directories: Directories
    _agreement: Agreement
    _engine: Engine
    _subject: Restorable
    _bring: Bring
    _check: Callable[[int], None]
    _dead: Callable[[], set[int]]
    # why the chosen checkpoint is not in this directory
    _unbrought: errors.LastcallError | None = None
    _spoiled: bool = False  # damage was found after live tensors had been written to, on some rank

    def load(self) -> Entry | None:
        """The checkpoint that all ranks continue from. Returns when all of them have it."""
        entries = self._catalog.entries() if self._world.rank == 0 else []
        order = [entry for entry in entries if entry.record.complete] + [
            entry for entry in entries if not entry.record.complete
        ]
        for number in range(len(order) + 1 if self._world.rank == 0 else 1_000_000):
            chosen, has_fallback = self._choose(order, number)
            error, verdict = self._attempt(number, chosen, has_fallback)
            if verdict.ok:
                return chosen
            self._judge(verdict, error)
            if chosen is None:
                raise errors.RanksError(f"not all ranks could begin: {verdict.because}")
            if self._world.rank == 0:
                log.warning("%s", self._catalog.set_aside(chosen.path, verdict.because))
        raise errors.RanksError("no checkpoint could be loaded by all ranks")

    def _choose(self, order: list[Entry], number: int) -> tuple[Entry | None, bool]:
        """The next one to try, and whether another would overwrite what it may leave half loaded."""
        if self._world.rank == 0:
            chosen = order[number] if number < len(order) else None
            has_fallback = number + 1 < sum(entry.record.complete for entry in order)
            spoiled = self._spoiled and (chosen is None or not chosen.record.complete)
            self._agreement.tell(
                f"load/{number}",
                {
                    "name": None if chosen is None else chosen.path.name,
                    "record": chosen.record.fingerprint
                    if chosen is not None and self._directories.spread
                    else "",
                    "has_fallback": has_fallback,
                    "spoiled": spoiled,
                },
            )
            if spoiled:
                raise errors.CheckpointError(_SPOILED)
            return chosen, has_fallback
        word = self._word(f"load/{number}", number, 0)
        if word.get("spoiled"):
            raise errors.CheckpointError(_SPOILED)
        name = word.get("name")
        if name is None:
            return None, False
        if self._directories.elsewhere:
            entry: Entry | None = self._brought(number, str(name), str(word.get("record")))
        else:
            path = self._catalog.root / Path(str(name)).name
            entry = next((entry for entry in self._catalog.entries() if entry.path == path), _unseen(path))
        return entry, word.get("has_fallback") is True

    def _word(self, key: str, number: int, rank: int) -> dict[str, Any]:
        """What a rank says about the attempt of this number."""
        until = self._clock.now() + rendezvous.TOGETHER
        while (word := self._agreement.wait_for(key, 1.0)) is None:
            if self._stop_requested():
                self._veto(number)
            self._check(rank)
            if self._clock.now() >= until:
                raise errors.RanksError(
                    f"rank {rank} has not reported within {rendezvous.TOGETHER:.0f} s what it loaded"
                )
        return word

    def _veto(self, number: int) -> NoReturn:
        self._rendezvous.leave()  # ranks that wait for this one to fetch a checkpoint do not vote yet
        for vote in ("ready", "load"):  # the others may already wait in the first of them
            self._agreement.veto(f"{vote}/{number}", STOPPED)
        raise Stopped

    def _brought(self, number: int, name: str, record: str) -> Entry:
        """The checkpoint in a directory that is not that of rank 0. One rank of each machine fetches it."""
        key = f"brought/{number}/{self._directories.name}"
        if self._directories.opens_it:
            why = ""
            try:
                self._bring(record)
            except Stopped:
                self._veto(number)
            except (errors.LastcallError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
            self._agreement.tell(key, {"why": why})
        else:
            why = str(self._word(key, number, self._directories.leader).get("why"))
        if why:
            kind = errors.CheckpointError if why.startswith(_DAMAGE) else errors.RanksError
            self._unbrought = kind(f"{name} could not be copied to {self._catalog.root}: {why}")
        return self._here(record) or _unseen(self._catalog.root / name)

    def _here(self, record: str) -> Entry | None:
        return next((entry for entry in self._catalog.entries() if entry.record.fingerprint == record), None)

    def _attempt(
        self,
        number: int,
        chosen: Entry | None,
        has_fallback: bool,
    ) -> tuple[errors.LastcallError | None, Verdict]:
        """Load this rank's part, and learn whether all could. Where no older checkpoint would overwrite a
        half loaded state, no rank begins before all have checked: an objection then ends this attempt on all
        ranks, for the reason that the objector gave."""
        checked: Verdict | None = None

        def ready() -> None:
            nonlocal checked
            checked = self._vote(f"ready/{number}", None)
            if not checked.ok:
                raise _Objection

        error: errors.LastcallError | None = None
        try:
            if chosen is not None:
                self._load_part(chosen, has_fallback, (lambda: None) if has_fallback else ready)
        except _Objection:
            pass
        except (errors.CheckpointError, errors.MismatchError, errors.RanksError) as caught:
            error = caught
            if not has_fallback and checked is None:
                checked = self._vote(f"ready/{number}", error)
        if checked is not None and not checked.ok:
            return error, checked
        return error, self._vote(f"load/{number}", error)

    def _load_part(self, chosen: Entry, has_fallback: bool, ready: Callable[[], None]) -> None:
        if self._unbrought is not None:
            found, self._unbrought = self._unbrought, None
            raise found
        if not chosen.record.files:
            raise errors.CheckpointError(f"{chosen.path.name} cannot be seen on this machine")
        rank, size = self._world.rank, self._world.size
        restore.attempt(chosen, self._engine, self._subject, has_fallback, rank, size, ready=ready)

    def _vote(self, name: str, error: errors.LastcallError | None) -> Verdict:
        why = "" if error is None else f"{type(error).__name__}: {error}"
        if self._stop_requested():
            self._agreement.veto(name, STOPPED)

        def stopped() -> str:
            return STOPPED if self._stop_requested() or self._rendezvous.left() else self._rendezvous.failed()

        until = self._clock.now() + rendezvous.TOGETHER
        return self._agreement.vote(name, error is None, why, until, self._dead, stopped)

    def _judge(self, verdict: Verdict, mine: errors.LastcallError | None) -> None:
        """Why not all could: a notice ends it, a state that does not fit is an error on every rank, damage is
        not."""
        if STOPPED in verdict.reasons.values():
            raise Stopped
        if isinstance(mine, errors.MismatchError):
            raise mine
        self._spoiled = self._spoiled or any(
            reason.startswith("PartlyLoaded") for reason in verdict.reasons.values()
        )
        if verdict.lost or not any(reason.startswith(_DAMAGE) for reason in verdict.reasons.values()):
            raise errors.RanksError(f"not all ranks could begin: {verdict.because}")


def _unseen(path: Path) -> Entry:
    return Entry(path, Record(0, 0, Kind.MANUAL, "", True, ()))
