"""The other ranks of this run, as one of them sees them: their announcements, their heartbeats, their
messages about a save.

Three side threads, each with a connection of its own: the agent, which agrees and saves (`joint`); the
listener, which waits for the announcements of others; the heartbeat, which says once a second that this rank
is alive and, on two ranks, monitors whether all are.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from lastcall import clock as clocks
from lastcall import errors, messages
from lastcall.core.process.identity import Process
from lastcall.core.ranks.agreement import Agreement
from lastcall.core.ranks.election import Holdings
from lastcall.core.ranks.heartbeat import HANG, LOST, Diagnosis, Heartbeat, HeartbeatThread, Monitor, Peers
from lastcall.core.ranks.world import World
from lastcall.core.store import Store
from lastcall.types import Capture, Notice

log = logging.getLogger("lastcall")
_LISTEN = 300.0  # seconds of one wait for announcements: the store answers at once when there is one
_OVER = "over"  # the last announcement of a round


class Ranks:
    def __init__(
        self,
        world: World,
        clock: clocks.Clock,
        store: Store,
        token: str,
        over: threading.Event | None = None,
        peers: Peers | None = None,
        part: Callable[[int, int, Capture], Capture | None] = lambda rank, step, mine: None,
    ) -> None:
        """`token`: of this incarnation. `over`: set when all ranks have finished, and the store may go at any
        time. `part`: what a rank that was killed would have saved as its own, as far as it is known."""
        self.rank = world.rank
        self.size = world.size
        self._clock = clock
        self._store = store
        self._over = over or threading.Event()
        self.token = token
        # the agent's, and at the start the training thread's
        self.agreement = Agreement(store, world.rank, world.size, clock)
        self._ear_agreement = self.agreement.clone()
        self._words = store.clone()  # of saves
        self._words_lock = threading.Lock()
        self._registered: dict[int, bytes] = {}  # the holdings that each rank has registered
        self._pulse = Heartbeat(store.clone(), world.rank, Process.own())
        self.peers = peers or Peers({}, "")
        self.failed: set[int] = set()  # ranks that reported that their training has failed
        self.frozen: set[int] = set()  # ranks without a heartbeat: no rank waits for them
        self.part_of = part
        self._closed = threading.Event()
        self._heart: HeartbeatThread | None = None

    # ---- the threads ---------------------------------------------------------------------------------------

    def begin(
        self,
        hang_seconds: float,
        progress: Callable[[], tuple[int, str]],
        notify: Callable[[Notice], None],
        grace: float,
    ) -> None:
        """All ranks are there. `notify` gets the others' announcements, `progress` returns this rank's
        progress."""
        self.peers = Peers.of_host(self._store, Process.own())
        self._notify, self._grace = notify, grace
        watch = Monitor(self._store.clone(), self.rank, self.size, self._clock, hang_seconds, progress()[0])
        self._heart = HeartbeatThread(self._pulse, watch, progress, self._found)
        self._heart.start()
        threading.Thread(target=self._listen, name="lastcall-listener", daemon=True).start()

    def finished(self) -> None:
        """All ranks have finished: the store may go at any time."""
        self._over.set()

    def close(self) -> None:
        """This rank exits. A wait in progress ends on its own: nothing waits for it."""
        self._closed.set()
        if self._heart is not None:
            self._heart.close()
        self._pulse.finish()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                news = self._ear_agreement.heard(_LISTEN)
            except errors.StoreLost as error:
                if not self._closed.is_set():
                    log.warning("Can no longer receive announcements from the other ranks: %s", error)
                return
            if news is None or self._closed.is_set():
                continue
            if _OVER in news:
                self._ear_agreement = self._ear_agreement.round(self._ear_agreement.number + 1)
            else:
                self._take(news)

    def _take(self, news: dict[str, Any]) -> None:
        rank = news.get("rank")
        if news.get("source") == LOST and isinstance(rank, int) and news.get("failed"):
            self.failed.add(rank)
        self.frozen |= {
            silent for silent in news.get("frozen", []) if isinstance(silent, int) and silent != self.rank
        }
        if rank == self.rank:
            return
        now = self._clock.now()
        left = news.get("left")
        deadline = now + (float(left) if isinstance(left, int | float) else self._grace)
        signum = news.get("signum")
        source = news["source"] if news.get("source") in (LOST, HANG) else f"rank {rank}"
        self._notify(
            Notice(
                str(source),
                str(news.get("reason", "a notice")),
                now,
                deadline,
                signum if isinstance(signum, int) else None,
            )
        )

    def _found(self, finding: Diagnosis) -> None:
        """What the monitor has seen. `joint` acts on it and informs the others."""
        if self._closed.is_set():
            return
        if finding.kind == "silent":
            log.warning("%s", finding.because)
            return
        log.error("%s", finding.because[:1].upper() + finding.because[1:])
        now = self._clock.now()
        source = LOST if finding.kind == "dead" else HANG
        if finding.kind == "frozen":
            self.frozen = set(finding.ranks) - {self.rank}
        self._notify(Notice(source, finding.because, now, now + self._grace))

    # ---- news ----------------------------------------------------------------------------------------------

    def announce(self, notice: Notice, *, failed: bool = False) -> None:
        """Inform the others. A lost store is no reason to stop."""
        left = None if notice.deadline is None else notice.deadline - self._clock.now()
        body: dict[str, object] = {
            "rank": self.rank,
            "source": notice.source,
            "reason": notice.reason,
            "left": left,
            "signum": notice.signum,
        }
        if left is not None:
            body["deadline"] = time.time() + left
        if failed:
            body["failed"] = True
        if notice.source == HANG:
            body["frozen"] = sorted(self.frozen)
        try:
            self.agreement.announce(body)
        except errors.StoreLost as error:
            log.warning("Could not announce %s to the other ranks: %s", notice.reason, error)

    def fail(self, why: str) -> None:
        """The training of this rank has failed."""
        self._pulse.fail(why)

    def next_round(self) -> None:
        """The run continues after an answered notice: the next one gets new registers."""
        with contextlib.suppress(errors.StoreLost):
            self.agreement.announce({_OVER: True, "deadline": 0})
        self.agreement = self.agreement.round(self.agreement.number + 1)
        self.failed, self.frozen = set(), set()

    # ---- what an election needs ----------------------------------------------------------------------------

    def register(self, holdings: tuple[tuple[int, ...], ...], alone: str) -> None:
        """Which ranks hold which piece of the shared state: a recovery needs this. Only the lowest holder of
        a piece registers it. `alone`: a digest of what is this rank's own, at the same boundary on all ranks:
        those with the same digest hold the same."""
        mine = [list(holders) for holders in holdings if holders and min(holders) == self.rank]
        body = messages.packed({"pieces": mine, "alone": alone})
        self._registered[self.rank] = body
        with contextlib.suppress(errors.StoreLost), self._words_lock:
            self._words.set(f"holdings/{self.rank}", body)

    def learn(self) -> bool:
        """Read what the others have registered, and keep it: the store may be lost with the rank whose
        holdings matter. Whether all of them have."""
        wanted = [rank for rank in range(self.size) if rank not in self._registered]
        with contextlib.suppress(errors.StoreLost), self._words_lock:
            for rank, data in zip(
                wanted, self._words.get_many([f"holdings/{rank}" for rank in wanted]), strict=True
            ):
                if data is not None:
                    self._registered[rank] = data
        return len(self._registered) == self.size

    def holdings(self) -> Holdings:
        """As registered; needed by the one rank that decides."""
        self.learn()
        found: dict[int, list[tuple[int, ...]]] = {}
        alike: dict[str, list[int]] = {}
        own = bool(messages.unpacked(self._registered.get(self.rank)).get("alone"))
        for rank in range(self.size):
            body = messages.unpacked(self._registered.get(rank))
            found[rank] = [tuple(holders) for holders in body.get("pieces", [])]
            if body.get("alone"):
                alike.setdefault(str(body["alone"]), []).append(rank)
            elif rank not in self._registered and own:
                # All ranks run one program: where this one has parameters that nothing says are others', too,
                # that one has. Whether they are the same is not known, and what is not known to be a replica
                # is none.
                found[rank].append((rank,))
        for ranks in alike.values():
            found[ranks[0]].append(tuple(ranks))
        return found

    def gone(self) -> set[int]:
        return self.peers.gone()

    def is_spokesrank(self) -> bool:
        """Whether this rank does what only one of them does: the lowest one that is alive."""
        return self.rank == min(set(range(self.size)) - self.gone(), default=0)

    def silent(self) -> set[int]:
        """Those that will not report a position."""
        return self.gone() | self.frozen

    def unable(self) -> set[int]:
        """Those that will not reach another boundary."""
        return self.gone() | self.failed

    # ---- words of a save -----------------------------------------------------------------------------------

    def tell(self, key: str, body: dict[str, object]) -> None:
        with contextlib.suppress(errors.StoreLost), self._words_lock:
            self._words.set(f"save/{key}", messages.packed(body))

    def hear(self, key: str, timeout: float) -> dict[str, object] | None:
        try:
            with self._words_lock:
                found = self._words.get(f"save/{key}", timeout)
        except errors.StoreLost:
            return None
        return None if found is None else messages.unpacked(found)
