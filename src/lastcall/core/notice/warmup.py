"""After the first step, when the optimizer's state exists: sizes are known, the plan is made, space and memory are prepared, off the
training thread."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from lastcall.core.engine import huge_pages
from lastcall.core.save import spare_space
from lastcall.types import Capture

if TYPE_CHECKING:
    from lastcall.core.session import Session

log = logging.getLogger("lastcall")
_LOOK, _LOOKS = 0.25, 240  # seconds between two looks for what other ranks hold, and how many


class Preparing:
    def __init__(self, session: Session) -> None:
        self._session = session
        self.begun = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """On the training thread, at a boundary: the same one on all ranks."""
        session = self._session
        self.begun = True
        if session.ranks is not None:
            session.ranks.register(session.subject.holdings(), session.subject.alone())
        capture = session.mine(session.subject.outline())
        session.expected_bytes = capture.nbytes
        sizes = session.saver.sizes(capture)
        self._thread = threading.Thread(target=self._prepare, args=(sizes, capture), name="lastcall-space", daemon=True)
        self._thread.start()

    def _learn(self) -> None:
        """What the other ranks hold, while they are there to say it."""
        ranks = self._session.ranks
        for _ in range(_LOOKS if ranks is not None else 0):
            assert ranks is not None
            if ranks.learn() or self._session.stopping.wait(_LOOK):
                return

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join(1.0)  # it may be touching memory for a snapshot: not worth waiting for

    def _prepare(self, sizes: list[int], capture: Capture) -> None:
        session, nbytes = self._session, capture.nbytes
        self._learn()
        if session.guard is not None:
            session.guard.prepare(capture)
        if session.background.wanted and not session.background.arena.reserve(nbytes):
            log.warning("No memory for a copy of the state (%.0f MB): periodic saves will stop training while they write", nbytes / 1e6)
        preparation = spare_space.Preparation(session.catalog, session.engine, session.budget, self._disturbed)
        if session.jit.spare:
            preparation.run(sizes)
        else:
            preparation.check(sizes)
        if preparation.method is not None:
            session.saver.method = preparation.method
        needed = session.budget.seconds(nbytes)
        if session.budget.measured and needed > session.jit.grace:
            log.warning(
                "A checkpoint of %.0f MB needs about %.0f s here, more than the grace of %.0f s: it may not be saved in time. "
                "Raise the grace of your platform and LASTCALL_GRACE_SECONDS, or save to a faster disk.",
                nbytes / 1e6, needed, session.jit.grace,
            )  # fmt: skip
        if session.jit.huge_pages:
            moved = huge_pages.gather(capture.sources, lambda rest: session.stopping.wait(rest) or session.latch.raised)
            log.debug("%.0f of %.0f MB of the state are in huge pages", moved / 1e6, nbytes / 1e6)

    def _disturbed(self) -> bool:
        return self._session.stopping.is_set() or self._session.latch.raised
