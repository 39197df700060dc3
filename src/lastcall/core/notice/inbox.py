"""Where notices arrive, from any thread and at any time after protect(): signals, other ranks, and files that
must be looked for."""

from __future__ import annotations

import signal
import threading

from lastcall.core.context import NoticeContext, RunContext
from lastcall.core.notice.launcher_link import LauncherLink
from lastcall.core.notice.phases import Phase, Phases
from lastcall.core.ranks.heartbeat import HANG, LOST
from lastcall.types import Notice


class Inbox:
    """`link`: None where a framework starts and ends the processes: no launcher, and no file to look for."""

    def __init__(self, context: NoticeContext, link: LauncherLink | None = None) -> None:
        self.link = link or LauncherLink.absent(context.clock, context.jit.grace)
        self.phases = Phases(context.events.emit)
        self._context = context
        self._rank_loss: Notice | None = None
        self._next_loss: Notice | None = None  # came while another notice was being answered
        self._losing = threading.Lock()
        self._muted = False
        self._wake = threading.Event()

    @classmethod
    def of_run(cls, context: RunContext) -> Inbox:
        catalog = context.catalog
        return cls(context, LauncherLink(catalog.root, catalog.private, context.clock, context.jit.grace))

    def notify(self, notice: Notice) -> None:
        """The one entry point for every source of notices; called from any thread, returns at once."""
        context = self._context
        context.copy_every_boundary()
        if notice.source in (LOST, HANG):
            self.lose_rank(notice)
        elif context.latch.offer(notice):
            left = None if notice.deadline is None else round(notice.deadline - context.clock.now(), 3)
            context.events.emit(
                "notice",
                source=notice.source,
                reason=notice.reason,
                deadline_in=left,
                step=context.step,
            )
        self._wake.set()

    def notify_signal(self, signum: int) -> None:
        self.notify(of_signal(self._context, signum))

    def lose_rank(self, notice: Notice) -> None:
        """A rank was lost, or hangs: save at once, unless a notice is being answered already. If training
        continues after that answer, a rank that is gone is still gone."""
        with self._losing:
            news = self._rank_loss is None and self.phases.phase is Phase.QUIET
            if news:
                self._rank_loss = notice
            elif notice.source == LOST:
                self._next_loss = notice
        if news:
            self._context.events.emit(
                "notice", source=notice.source, reason=notice.reason, step=self._context.step
            )  # fmt: skip
        self._wake.set()

    @property
    def rank_loss(self) -> Notice | None:
        return self._rank_loss

    def forget_rank_loss(self) -> None:
        """It was answered, and training continues."""
        with self._losing:
            self._rank_loss, self._next_loss = self._next_loss, None
        if self.pending:
            self._wake.set()

    def mute(self) -> None:
        """The notice was answered, and training continues until the process is killed: what comes later is
        not answered."""
        self._muted = True

    @property
    def pending(self) -> bool:
        return not self._muted and (self._context.latch.raised or self._rank_loss is not None)

    def look(self) -> None:
        """Look for a notice that comes as a file. Also while one is being answered: a second may bring the
        deadline forward."""
        wanted = not self._context.latch.raised or self.link.launched
        if wanted and (notice := self.link.notice()) is not None:
            self.notify(notice)

    def stop_requested(self) -> bool:
        """For waits before the agent runs: no other thread looks for files then."""
        self.look()
        return self._context.latch.raised

    def wait(self, timeout: float) -> bool:
        """Wait until a notice has arrived. False if none has in time."""
        if not self._wake.wait(timeout):
            return False
        self._wake.clear()
        return True

    def wake(self) -> None:
        self._wake.set()


def of_signal(context: NoticeContext, signum: int) -> Notice:
    """A signal brings no deadline: the grace that is configured counts from now."""
    now = context.clock.now()
    return Notice("signal", signal.Signals(signum).name, now, now + context.jit.grace, signum)
