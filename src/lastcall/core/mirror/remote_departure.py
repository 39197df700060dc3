"""A departure note in the mirror: like `departure` in the directory, for a next incarnation that starts with
another directory. It waits for what the previous one may still be uploading, and not longer than that may
live."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core import timing
from lastcall.core.checkpoint import departure
from lastcall.core.checkpoint.catalog import PRIVATE
from lastcall.core.checkpoint.departure import Departure
from lastcall.core.mirror.remote_catalog import RemoteCatalog
from lastcall.core.process.identity import Process

log = logging.getLogger("lastcall")
NAME = f"{PRIVATE}/leaving.json"
_SMALL = 64 * 1024
_LOOK = 1.0


class RemoteDepartureNote:
    def __init__(self, remote: RemoteCatalog, clock: clocks.Clock) -> None:
        self._remote = remote
        self._clock = clock
        self._saying: threading.Thread | None = None

    # ---- the one that leaves -------------------------------------------------------------------------------

    def say(self, reason: str, seconds: float) -> None:
        """Returns at once: the save does not wait for a store that may be slow."""
        leaver = Departure(0, reason, seconds, Process.own(), os.uname().nodename)
        self._saying = self._aside(
            lambda: self._remote.place.write(NAME, json.dumps(asdict(leaver)).encode())
        )

    def unsay(self, patience: float) -> None:
        """Nothing is uploaded any more. If the note cannot be removed, the next one waits in vain, but only
        until its time is over."""
        said, self._saying = self._saying, None
        if said is None:
            return

        def take_back() -> None:
            said.join()
            self._remote.place.remove([NAME])

        self._aside(take_back).join(patience)

    def _aside(self, what: Callable[[], None]) -> threading.Thread:
        def work() -> None:
            try:
                what()
            except errors.LastcallError as error:
                log.warning(
                    "Could not update the shutdown marker in the mirror; the next run may wait "
                    "longer than needed: %s",
                    error,
                )

        thread = threading.Thread(target=work, name="lastcall-departure", daemon=True)
        thread.start()
        return thread

    # ---- the next one --------------------------------------------------------------------------------------

    def wait_for_the_one_before(self, stop_requested: Callable[[], bool]) -> bool:
        """False if a notice came meanwhile."""
        mine, place = Process.own(), self._remote.place
        until: dict[Process, float] = {}
        while (data := place.read(NAME, _SMALL)) is not None:
            leaver = departure.parse(data)
            if leaver is None or leaver.process == mine or leaver.process.gone(mine.host):
                break
            if leaver.process not in until:
                until[leaver.process] = self._until(leaver)
            if self._clock.now() >= until[leaver.process]:
                break
            if stop_requested():
                return False
            self._clock.sleep(_LOOK)
        if data is not None:
            place.remove([NAME])
        return True

    def _until(self, leaver: Departure) -> float:
        """Computed once: our own clock counts from then on."""
        left = leaver.seconds - (self._remote.place.age(NAME) or 0.0) + timing.AFTERWARDS
        if left > 0:
            log.warning(
                "Waiting for %s, which was asked to stop (%s) and may still be uploading to %s: for at most "
                "%.0f s",
                leaver,
                leaver.reason,
                self._remote.url,
                left,
            )
        return self._clock.now() + left
