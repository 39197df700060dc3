"""What answers the notices of a loop that has no session, because its own code saves: the agent with its
responder, and the writer of events."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lastcall.core.context import NoticeContext
from lastcall.core.notice.agent import Agent
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.event_writer import EventWriter
from lastcall.core.notice.inbox import Inbox
from lastcall.core.notice.responder import Responder, Strategy
from lastcall.types import Notice


class NoticeService:
    """`on_notice` and `passing`: as for the agent."""

    def __init__(
        self,
        context: NoticeContext,
        inbox: Inbox,
        answer: Answer,
        strategy: Strategy,
        on_notice: Callable[[Notice], None] = lambda notice: None,
        *,
        passing: bool = False,
    ) -> None:
        self._context = context
        self._inbox = inbox
        self._stopping = threading.Event()
        responder = Responder(context, answer, strategy, inbox.look)
        self._agent = Agent(context, inbox, responder, self._stopping, on_notice, passing=passing)
        self._writer = EventWriter(context, inbox.link, self._stopping)

    def start(self, resumed: str | None) -> None:
        """From here on notices are answered. `resumed`: the name of the checkpoint that training continues
        from."""
        self._context.events.emit("start", resumed=resumed)
        self._agent.start()
        self._writer.start()

    def stop(self) -> None:
        """From any thread, the agent's too: so neither thread is waited for."""
        context = self._context
        context.events.emit("stop", outcome=context.outcome.text, step=context.step)
        self._inbox.phases.close()
        self._stopping.set()
        self._inbox.wake()
        self._writer.close()
