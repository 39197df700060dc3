"""After the first step, when the optimizer's state exists: sizes are known, the plan is made, space and
memory are prepared, off the training thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lastcall.core import timing
from lastcall.core.checkpointer import Checkpointer
from lastcall.core.context import RunContext
from lastcall.core.engine import huge_pages
from lastcall.core.engine.writer import Engine
from lastcall.core.notice.periodic import PeriodicSaver
from lastcall.core.ranks.peers import Ranks
from lastcall.core.save import spare_space
from lastcall.core.save.saver import Saver
from lastcall.types import Capture

log = logging.getLogger("lastcall")
_LOOKS = 240  # how often the other ranks' holdings are read


class Warmup:
    """`stopping`: set when the session ends. `on_sizes`: called with an outline of the state, off the
    training thread."""

    def __init__(
        self,
        context: RunContext,
        checkpointer: Checkpointer,
        periodic: PeriodicSaver,
        saver: Saver,
        engine: Engine,
        ranks: Ranks | None,
        stopping: threading.Event,
        on_sizes: Callable[[Capture], None] = lambda capture: None,
    ) -> None:
        self._context = context
        self._checkpointer = checkpointer
        self._periodic = periodic
        self._saver = saver
        self._engine = engine
        self._ranks = ranks
        self._stopping = stopping
        self._on_sizes = on_sizes
        self._thread: threading.Thread | None = None
        self.begun = False

    def begin(self) -> None:
        """On the training thread, at a boundary: the same one on all ranks."""
        subject = self._context.subject
        self.begun = True
        if self._ranks is not None:
            self._ranks.register(subject.holdings(), subject.unreplicated_digest())
        capture = self._checkpointer.portion(subject.outline())
        self._checkpointer.expected_bytes = capture.nbytes
        sizes = self._saver.sizes(capture)
        self._thread = threading.Thread(
            target=self._prepare, args=(sizes, capture), name="lastcall-space", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join(1.0)  # it may be touching memory for a snapshot: not worth waiting for

    def _learn(self) -> None:
        """What the other ranks hold, while they are alive to say it."""
        ranks = self._ranks
        for _ in range(_LOOKS if ranks is not None else 0):
            assert ranks is not None
            if ranks.learn() or self._stopping.wait(timing.LOOK):
                return

    def _prepare(self, sizes: list[int], capture: Capture) -> None:
        context, nbytes = self._context, capture.nbytes
        self._learn()
        self._on_sizes(capture)
        if context.background_saves and not self._periodic.reserve(nbytes):
            log.warning(
                "Not enough memory for a copy of the state (%.0f MB): training will wait while periodic "
                "saves are written",
                nbytes / 1e6,
            )
        preparation = spare_space.Preparation(context.catalog, self._engine, context.budget, self._disturbed)
        if context.jit.spare:
            preparation.run(sizes)
        else:
            preparation.check(sizes)
        if preparation.method is not None:
            self._saver.method = preparation.method
        needed = context.budget.seconds(nbytes)
        if context.budget.measured and needed > context.jit.grace:
            log.warning(
                "A checkpoint of %.0f MB needs about %.0f s here, more than the grace of %.0f s: it may not "
                "be saved in time. "
                "Raise the grace of your platform and LASTCALL_GRACE_SECONDS, or save to a faster disk.",
                nbytes / 1e6,
                needed,
                context.jit.grace,
            )
        if context.jit.huge_pages:
            moved = huge_pages.gather(
                capture.sources, lambda rest: self._stopping.wait(rest) or context.latch.raised
            )
            log.debug("%.0f of %.0f MB of the state are in huge pages", moved / 1e6, nbytes / 1e6)

    def _disturbed(self) -> bool:
        return self._stopping.is_set() or self._context.latch.raised
