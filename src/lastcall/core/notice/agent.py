"""The agent: a thread that sleeps until there is a notice, then runs the responder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lastcall import errors
from lastcall.core import timing
from lastcall.core.context import NoticeContext
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.phases import Phase
from lastcall.core.notice.responder import Responder
from lastcall.core.ranks.heartbeat import HANG
from lastcall.types import Notice

log = logging.getLogger("lastcall")


class Agent:
    """`on_notice`: before a notice is answered. `look_around`: a few times a second while nothing happens.
    `passing`: training continues after every answer, not only after that to a hang."""

    def __init__(
        self,
        context: NoticeContext,
        inbox: Inbox,
        responder: Responder,
        stopping: threading.Event,
        on_notice: Callable[[Notice], None],
        look_around: Callable[[], None] = lambda: None,
        *,
        passing: bool = False,
    ) -> None:
        self._context = context
        self._inbox = inbox
        self._responder = responder
        self._stopping = stopping
        self._on_notice = on_notice
        self._look_around = look_around
        self._passing = passing
        self._thread = threading.Thread(target=self._watch, name="lastcall-agent", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """The session ends; `stopping` is set."""
        self._inbox.wake()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            if not self._inbox.wait(timing.LOOK):
                self._look()
            elif (
                self._inbox.pending
                and self._inbox.phases.phase is Phase.QUIET
                and not self._stopping.is_set()
            ):
                self._answer()

    def _look(self) -> None:
        try:
            self._look_around()
            self._inbox.look()
        except Exception:  # the agent must not stop looking
            log.exception(
                "Internal error in lastcall; it continues to listen for notices (please report this)"
            )

    def _answer(self) -> None:
        try:
            if (came := self._context.latch.notice) is not None:
                self._on_notice(came)
            notice = self._inbox.rank_loss or came
            assert notice is not None
            hang = notice.source == HANG and self._context.jit.on_hang == "save"
            self._responder.run(notice, passing=self._passing or hang)
        except errors.StoreLost as error:
            log.warning("Could not answer the notice together with the other ranks: %s", error)
            self._responder.fault()
        except Exception:
            log.exception(
                "Internal error in lastcall; will try to save at the next step (please report this)"
            )
            self._responder.fault()
