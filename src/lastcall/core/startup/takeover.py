"""How an incarnation takes the directory over: it waits for the previous one, for as long as that may still
live, and not longer.

A process that was asked to stop has noted until when it may live (`departure`), and is waited for until then.
One that holds the lock without such a note is another run by mistake, or got no notice; on another machine it
may also be dead, and its lock not yet released. Where there are no locks, the note is all that is known; a
process that comes back later finds the directory taken (`ownership`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lastcall import clock as clocks
from lastcall.core import timing
from lastcall.core.checkpoint import departure
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.departure import Departure
from lastcall.core.process.identity import Process

log = logging.getLogger("lastcall")
PATIENCE = 10.0  # seconds for a process of this machine that holds the directory without a departure note
LEASE = 120.0  # ... and for one of another machine: NFS keeps the lock of a dead one for 90 s
_LOOK = 0.2


class Takeover:
    def __init__(self, catalog: Catalog, clock: clocks.Clock, stop_requested: Callable[[], bool]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._stop_requested = stop_requested
        self._mine = Process.own()
        # processes that are shutting down, and when they count as dead
        self._until: dict[Process, float] = {}
        self._said: set[str] = set()

    def open(self) -> bool:
        """Make the directory and lock it. False if a notice came while waiting: then it is not locked.
        BusyError if another process uses it."""
        catalog, clock = self._catalog, self._clock
        catalog.prepare()
        began = quiet = clock.now()
        locked = catalog.try_lock()
        while (waiting := self._leavers(locked)) or not locked:
            if waiting:
                # a process that exits takes a moment between removing its note and its end
                quiet = clock.now()
            elif clock.now() >= quiet + self._patience():
                raise catalog.busy()
            if self._stop_requested():
                catalog.close()
                return False
            clock.sleep(_LOOK)
            locked = locked or catalog.try_lock()
        if self._said:
            log.info("The directory is free after %.1fs", clock.now() - began)
        departure.forget(catalog.private)
        return True

    def _leavers(self, locked: bool) -> list[float]:
        """Until when to wait for each process that is shutting down and may still be alive."""
        there = []
        for leaver in departure.found(self._catalog.private):
            if leaver.process == self._mine or leaver.gone(
                self._mine, locked and not self._catalog.without_locks
            ):
                continue
            if self._until_of(leaver) > self._clock.now():
                there.append(self._until_of(leaver))
            else:
                ago = f"{timing.AFTERWARDS:.0f} s ago"
                self._say(f"{leaver} should have ended {ago}: no longer waiting for it")
        return there

    def _until_of(self, leaver: Departure) -> float:
        """Computed once: our own clock counts from then on."""
        if leaver.process not in self._until:
            left = departure.left(self._catalog.private, leaver)
            self._until[leaver.process] = self._clock.now() + left + timing.AFTERWARDS
            if left + timing.AFTERWARDS > 0:
                self._say(
                    f"Waiting for {leaver}, which was asked to stop ({leaver.reason}) and may still be "
                    "saving: "
                    f"for at most {left + timing.AFTERWARDS:.0f} s"
                )
        return self._until[leaver.process]

    def _patience(self) -> float:
        """For a process without a departure note."""
        owner = self._catalog.owner()
        seconds = PATIENCE if owner.host == self._mine.host else LEASE
        if not self._until:
            self._say(f"Waiting for {owner}, which holds {self._catalog.root}: for at most {seconds:.0f} s")
        return seconds

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("%s", sentence)
