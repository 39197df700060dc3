"""The driver of a protected loop: what plain loops, Accelerate and Trainer do in the same order, whatever
their loop looks like.

begin        listen to signals, restore the newest checkpoint, start the session
at_boundary  a step is complete: answer a notice, begin a periodic save, say when to come by again
failed       an exception leaves the loop
end          stop the session, let go of the signals, and leave the process where it must be left
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lastcall import errors
from lastcall.adapters.torch import world as worlds
from lastcall.adapters.torch.subject import TorchSubject
from lastcall.adapters.torch.tensors import pinned
from lastcall.core import session as sessions
from lastcall.core.context import RunContext
from lastcall.core.mirror import mirror
from lastcall.core.notice.inbox import Inbox
from lastcall.core.process import refusal
from lastcall.core.session import Session
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.shield.listening import Afterwards, Protection
from lastcall.storage.files import Files
from lastcall.types import Outcome


class Driver:
    def __init__(
        self,
        root: Path,
        subject: TorchSubject,
        jit: JITCheckpointConfig,
        periodic: PeriodicCheckpointConfig,
        tensors: Iterator[torch.Tensor],
        *,
        files: Files | None = None,
        run: str = "",
        background_saves: bool | None = None,
    ) -> None:
        """`tensors`: some of the state, which say where copies of it are best kept."""
        mirror.reserve(jit.mirror, root, run)
        world = worlds.find(jit)
        subject.together.among(world.rank, world.size)
        self.context = RunContext.create(
            root,
            subject,
            jit,
            periodic,
            files=files,
            allocate=pinned.allocator(tensors),
            world=world,
            run=run,
            background_saves=background_saves,
        )
        self.gate = self.context.gate
        self.world = world
        self._subject = subject
        self._inbox = Inbox.of_run(self.context)
        self._protection = Protection(self.context, self._inbox)
        self._session: Session | None = None

    # ---- begin ---------------------------------------------------------------------------------------------

    def begin(self, before: Callable[[], None] = lambda: None) -> Session:
        """Restore, and start the session. `before`: called once signals are listened to."""
        with refusal.explained():
            self._protection.begin()
        try:
            before()
            self._session = sessions.begin(self.context, self._inbox)
        except errors.StorageError as error:
            self.let_go()
            # the threads that asked the store are of no use to who reads this
            raise error.with_traceback(None) from None
        except BaseException:
            self.let_go()
            raise
        return self._session

    @property
    def session(self) -> Session:
        assert self._session is not None, "the block was not entered"
        return self._session

    @property
    def listening(self) -> bool:
        """Whether signals reach this run."""
        return self._protection.listening

    @property
    def outcome(self) -> Outcome | None:
        return self.context.outcome.value

    @property
    def saved(self) -> bool:
        """Whether a notice came and the run was saved for it."""
        return self.context.outcome.saved and self.context.latch.raised

    @property
    def notified(self) -> bool:
        return self.context.latch.raised

    @property
    def stopping(self) -> bool:
        """A notice has come, to this rank or to another."""
        return self.context.latch.raised or self._inbox.phases.open

    # ---- boundaries ----------------------------------------------------------------------------------------

    def at_boundary(self, *, epoch_end: bool = False) -> None:
        """The training thread is at a boundary, and has said so to the subject."""
        subject, session = self._subject, self.session
        if subject.step < subject.due and not epoch_end:
            return
        self._protection.rearm()
        subject.attend()
        if session.open:
            subject.look_for_overlooked(last=True)
        session.at_boundary(epoch_end=epoch_end)
        subject.attend_from(session.next_due())
        if session.open:  # it opened while we were looking
            subject.due = 0

    # ---- end -----------------------------------------------------------------------------------------------

    def settle_signals(self) -> None:
        """Have every signal that has come so far heard."""
        self._protection.settle()

    def end(self) -> None:
        """Stop the session. Only who has a notice is on the way out: a script may catch what it raised, and
        train on."""
        saved = self.saved
        self.session.stop()
        self.let_go(ignore=saved)

    def let_go(self, *, ignore: bool = False) -> None:
        self._subject.remove()
        self._protection.let_go(ignore=ignore)

    def leave(self, left: BaseException | None) -> BaseException | None:
        """After end(): the process ends here if it must not continue. Otherwise returns what is to be
        raised."""
        left = self._protection.leave(left, self.session.preempted)
        Afterwards.begin(self.context, self._inbox.link)
        return left
