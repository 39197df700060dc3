"""From the first completed step of a watched script to its exit: signals, the launcher, the other ranks, and
the answer to a notice."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from lastcall import errors, settings
from lastcall.adapters.accelerate import atomic
from lastcall.adapters.accelerate.participants import Participants
from lastcall.adapters.accelerate.script_save import ScriptSave
from lastcall.adapters.torch import world as worlds
from lastcall.core.context import NOWHERE, NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.launcher_link import LauncherLink
from lastcall.core.notice.service import NoticeService
from lastcall.core.process import exits
from lastcall.core.ranks.agreement import Agreement
from lastcall.settings import JITCheckpointConfig
from lastcall.shield.listening import Guarded
from lastcall.types import Outcome

log = logging.getLogger("lastcall")


class ScriptSession:
    """`private`: the folder for events and progress, if there is one. `nbytes`: about what a save has to
    write."""

    def __init__(self, jit: JITCheckpointConfig, private: Path | None, nbytes: Callable[[], int]) -> None:
        self.why_not = ""  # why the same command would not resume from what the script saves
        self._jit = jit
        self._context = NoticeContext.beside(private, jit, _rank())
        self._link = LauncherLink(Path.cwd(), NOWHERE, self._context.clock, jit.grace)
        inbox = Inbox(self._context, self._link)
        self._inbox = inbox
        self._answer = Answer(self._context, inbox.phases, self._stop)
        self.save = ScriptSave(self._context, self._answer, nbytes, self.die)
        self._context.progress.where = lambda: self.save.steps
        self._service = NoticeService(self._context, inbox, self._answer, self.save)
        self._guarded = Guarded(jit, self._on_signal, inbox.notify)
        self._over = False

    def listen(self) -> None:
        """BusyError where another run is protected in this process."""
        self._guarded.begin()

    def start(self, resumed: str | None) -> Participants:
        """Join the launcher and the other ranks; from here on a notice is answered. `lastcall run` must know
        which processes to wait for, and how this one ends: what is in between turns every code into 1."""
        self.tell(step=0)
        atexit.register(self._at_exit, os.getpid())
        participants, world = Participants(), worlds.find(self._jit)
        if world.many:
            store = world.meet()
            participants = Participants(world.rank, world.size, store)
            ranks = Agreement(store, world.rank, world.size, self._context.clock)
            self.save.join(ranks)
            listen = functools.partial(self.save.listen, ranks.clone(), self._inbox.notify)
            threading.Thread(target=listen, name="lastcall-listener", daemon=True).start()
        self._service.start(resumed)
        return participants

    def tell(self, **changes: object) -> None:
        """Keep the launcher informed."""
        self._link.tell(**changes)

    @property
    def notified(self) -> bool:
        return self._context.latch.raised

    # ---- the save that answers a notice --------------------------------------------------------------------

    def begin_save(self) -> atomic.Occasion:
        self.save.begin()
        return atomic.Occasion(self._answer.notice, not self.why_not)

    def end_save(self, path: Path, *, answers: bool) -> None:
        """`answers`: whether this save answers a notice."""
        self.tell(root=str(path.parent), checkpoint=path.name)
        if answers:
            self.save.committed(path.name, atomic.NOT_EXACT)

    def conclude(self, saved: bool) -> bool:
        return self.save.conclude(saved)

    def preempted(self) -> errors.Preempted:
        """The script has saved. Returns the exception that leaves it."""
        notice, why_not = self._answer.notice, self.why_not
        seconds = self._context.clock.now() - notice.at
        log.info("JIT checkpoint completed in %.1fs, by the script's own save", seconds)
        code = exits.code(notice, not why_not, self._jit.exit_code)
        exits.see_out(code, self._answer.deadline)
        self._stop()
        if why_not:
            log.warning(
                "The run is saved, but the same command would not resume from it: %s. The exit code is the "
                "signal's own. Start it with: lastcall run --resume-args '--resume_from_checkpoint {path}' "
                "-- COMMAND",
                why_not,
            )
        return errors.Preempted(code, f"saved and stopped after {notice.reason}")

    # ---- the end -------------------------------------------------------------------------------------------

    def let_go(self, *, ignore: bool = False) -> None:
        """Restore the signal handlers; no thread waits any longer."""
        self._over = True
        self._inbox.phases.close()
        self._guarded.let_go(ignore=ignore)

    def die(self) -> None:
        """Nothing is saved."""
        self._stop()
        exits.die_of(self.signum)

    @property
    def signum(self) -> int:
        """Of the notice; SIGTERM where it was no signal."""
        notice = self._context.latch.notice
        return signal.SIGTERM if notice is None or notice.signum is None else notice.signum

    def _on_signal(self, signum: int, count: int) -> None:
        if count > 1 and signum == signal.SIGINT:
            exits.die_of(signum)
        self._inbox.notify_signal(signum)

    def _at_exit(self, pid: int) -> None:
        """The interpreter exits. A forked child is not this process, whatever it inherits."""
        if self._over or os.getpid() != pid:
            return
        failed = getattr(sys, "last_value", None) is not None
        self._context.outcome.decide(Outcome.FAILED if failed else Outcome.FINISHED)
        self._stop()

    def _stop(self) -> None:
        """The last report to the launcher, and the last events."""
        outcome = self._context.outcome
        stays = {"stays": self.why_not} if outcome.saved else {}
        self.tell(step=self.save.steps, outcome=outcome.text, **stays)
        self._service.stop()


def _rank() -> int:
    """For the names of files only."""
    variables = settings.of_torchrun()
    return int(variables["RANK"]) if variables is not None else 0
