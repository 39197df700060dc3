"""Where the notices of a train worker come from: signals and the stop file, Ray's node drains, the other
ranks. Each one reaches the inbox of this rank, Ray's controller and the other ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from lastcall import errors
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.worker.connection import RankConnection
from lastcall.adapters.ray.worker.preemption_info import PreemptionInfoWriter
from lastcall.core.context import NoticeContext
from lastcall.core.notice import inbox as inboxes
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.inbox import Inbox
from lastcall.types import Notice

log = logging.getLogger("lastcall")
_LISTEN = 300.0  # seconds of one wait for an announcement
Nodes = Mapping[str, Sequence[int]]  # the ranks on each node that will be gone


class WorkerNotices:
    def __init__(
        self,
        context: NoticeContext,
        inbox: Inbox,
        answer: Answer,
        connection: RankConnection,
        info_writer: PreemptionInfoWriter,
    ) -> None:
        self._context = context
        self._inbox = inbox
        self._answer = answer
        self._connection = connection
        self._info_writer = info_writer
        # of the first notice; None where another rank has announced it
        self._nodes: Nodes | None = None
        self._lock = threading.Lock()

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="lastcall-listener", daemon=True).start()

    def on_signal(self, signum: int, count: int) -> None:
        self.on_notice(inboxes.of_signal(self._context, signum))

    def on_notice(self, notice: Notice) -> None:
        """For this process, and so for its node."""
        self._take(notice, {internals.node_id(): [self._connection.rank]})

    def on_drain(self, left: float | None, nodes: Nodes) -> None:
        """Ray drains nodes."""
        now = self._context.clock.now()
        deadline = now + (self._context.jit.grace if left is None else left)
        self._take(Notice("drain", "node drain", now, deadline), nodes, known_to_ray=True)

    def announce(self, notice: Notice) -> None:
        """To the other ranks; raises StoreLost."""
        rank = self._connection.rank
        if self._nodes is None:
            log.info("%s announced %s: rank %d saves too", notice.source.capitalize(), notice.reason, rank)
            return
        left = self._answer.left
        self._connection.agreement.announce(
            {
                "rank": rank,
                "reason": notice.reason,
                "nodes": self._nodes,
                "left": left,
                "deadline": time.time() + left,
                "drain": notice.source == "drain",
            }
        )

    def _take(
        self, notice: Notice, nodes: Nodes, *, announce: bool = True, known_to_ray: bool = False
    ) -> None:
        """`known_to_ray`: Ray itself informs every rank of a drain, with its own deadline."""
        latch, phases = self._context.latch, self._inbox.phases
        with self._lock:
            held = latch.notice
            if phases.closed:
                return
            if held is None:  # before the agent can read it
                self._nodes = dict(nodes) if announce else None
            self._inbox.notify(notice)
            changed = held is None or (latch.notice is not None and latch.notice.deadline != held.deadline)
        if changed and not known_to_ray:
            self._info_writer.write(self._answer.left, nodes)

    def _listen(self) -> None:
        connection = self._connection.clone()
        try:
            while not self._inbox.phases.closed:
                news = connection.agreement.heard(_LISTEN)
                if news is not None and news.get("rank") != connection.rank:
                    self._take_announced(news)
        except errors.StoreLost as error:
            log.debug("Cannot receive announcements of the other ranks any longer: %s", error)

    def _take_announced(self, news: Mapping[str, object]) -> None:
        now = self._context.clock.now()
        # seconds, since the clocks of two nodes may differ
        left = float(str(news.get("left", self._context.jit.grace)))
        notice = Notice(f"rank {news.get('rank')}", str(news.get("reason")), now, now + left)
        nodes = news.get("nodes")
        self._take(
            notice,
            nodes if isinstance(nodes, dict) else {},
            announce=False,
            known_to_ray=bool(news.get("drain")),
        )
