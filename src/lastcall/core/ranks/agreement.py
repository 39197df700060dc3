"""One decision for all ranks, through the store: no collective, no rank in charge, and no time-out that could
split it.

Every rank writes its position under a key of its own and adds one to a counter. The rank that completes the
counter reads them all, decides, and claims the decision; the others wait for the decision's key alone. So the
traffic grows with the number of ranks, not with its square. A rank that has waited long enough, or that knows
the missing ones to be dead, decides from what is there and claims, too: the first claim stays, and all ranks
obey the register, including the one that was too late.

Discarded: a barrier and a common function of what all read (one rank's time-out is another rank's success:
they split; and every rank reads everything); a leader that decides (it may be the one that died).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lastcall import clock as clocks
from lastcall import errors, messages
from lastcall.core.ranks.election import Decision, Position
from lastcall.core.store import Store

log = logging.getLogger("lastcall")
_TICK = 1.0  # seconds between two checks which ranks are dead
_SOONER = 1.0  # seconds by which a later notice must shorten the deadline to be announced
_NEWS = 100  # announcements a round
_REASONS = 64  # kept of a vote: all ranks read its result, which must not grow with their number


@dataclass(frozen=True)
class Verdict:
    """The result of a vote: the same on all ranks, unless the store was lost on the way to one of them."""

    ok: bool
    # of the ranks that said no, or nothing; 64 at most
    reasons: Mapping[int, str] = field(default_factory=dict)
    lost: bool = False  # the store is gone: nothing is known of the others

    @property
    def because(self) -> str:
        return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(self.reasons.items())[:8])


class Agreement:
    """One thread's access to the decisions of one round; the store's keys are those of this incarnation
    alone.

    A round is one notice and what follows from it. Where the run continues afterwards (a hang that was
    saved), the next round begins with keys of its own. Every rank goes through all rounds in order: one that
    was frozen finds the old decisions and catches up.
    """

    def __init__(self, store: Store, rank: int, size: int, clock: clocks.Clock, number: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.number = number
        self._store = store
        self._clock = clock
        self._news = 1

    def round(self, number: int) -> Agreement:
        """The same for another round, over the same connection."""
        return Agreement(self._store, self.rank, self.size, self._clock, number)

    def clone(self) -> Agreement:
        """The same for another thread, over a connection of its own."""
        return Agreement(self._store.clone(), self.rank, self.size, self._clock, self.number)

    def close(self) -> None:
        self._store.close()

    # ---- news: these raise StoreLost -----------------------------------------------------------------------

    def announce(self, notice: Mapping[str, Any]) -> None:
        """Announce a notice to all ranks. The first one of a round counts; a later one is announced only if
        its "deadline" (seconds on a clock that all ranks share, such as the wall clock) comes at least a
        second earlier, so that a thousand ranks with the same notice announce it once."""
        body = messages.packed(notice)
        for number in range(1, _NEWS + 1):
            held = self._store.claim(self._key(f"news/{number}"), body)
            if held == body or not _sooner(notice, messages.unpacked(held)):
                return

    def heard(self, timeout: float) -> dict[str, Any] | None:
        """The next announcement of this round: first the notice, then each one that shortens it. None if none
        came in time."""
        found = self._store.get(self._key(f"news/{self._news}"), timeout)
        if found is None:
            return None
        self._news += 1
        return messages.unpacked(found)

    def tell(self, key: str, body: Mapping[str, Any]) -> None:
        self._store.set(self._key(f"told/{key}"), messages.packed(body))

    def wait_for(self, key: str, timeout: float) -> dict[str, Any] | None:
        found = self._store.get(self._key(f"told/{key}"), timeout)
        return None if found is None else messages.unpacked(found)

    # ---- decisions: these never raise, and end soon after `until` ------------------------------------------

    def agree(
        self,
        phase: str,
        position: Position,
        decide: Callable[[dict[int, Position]], Decision],
        until: float,
        dead: Callable[[], set[int]] = set,
    ) -> Decision:
        """The one decision of this phase. The caller holds its position until then. `dead` gives the ranks
        known to be gone: no rank waits for them, and positions that they wrote before they died do not count.
        Once a round and phase."""

        def conclude(said: Sequence[bytes | None]) -> bytes:
            found = (Position.from_bytes(data) for data in said)
            positions = {rank: at for rank, at in enumerate(found) if at is not None and at.rank == rank}
            try:
                decision = decide(positions)
            except Exception as error:
                # no other rank would decide better from the same positions, and all of them wait
                log.exception("Could not make a decision from %s", positions)
                decision = Decision(
                    "abort", because=f"could not make a decision: {type(error).__name__}: {error}"
                )
            return replace(decision, token=secrets.token_hex(8)).to_bytes()

        try:
            return Decision.from_bytes(self._settle(phase, position.to_bytes(), conclude, until, dead))
        except errors.StoreLost as error:
            others = tuple(rank for rank in range(self.size) if rank != self.rank)
            because = f"the store is lost ({error}): nothing is known about the other ranks"
            return Decision("alone", position.step, position.entered, (self.rank,), others, because)

    def vote(
        self,
        name: str,
        ok: bool,
        why: str,
        until: float,
        dead: Callable[[], set[int]] = set,
        stopped: Callable[[], str] = str,
    ) -> Verdict:
        """Whether all ranks say yes; also a barrier. A rank that has not answered by then has said no. Once a
        round and name. `stopped`: called once a second while waiting for others; a reason that it returns is
        a veto."""

        def conclude(said: Sequence[bytes | None]) -> bytes:
            reasons = ((rank, _objection(data)) for rank, data in enumerate(said))
            return messages.packed(
                {
                    "no": dict(
                        itertools.islice(((rank, why) for rank, why in reasons if why is not None), _REASONS)
                    )
                }
            )

        try:
            result = self._settle(
                f"vote/{name}",
                messages.packed({"ok": ok, "why": why}),
                conclude,
                until,
                dead,
                lambda: self._no(stopped()),
            )
        except errors.StoreLost as error:
            return Verdict(False, {self.rank: f"the store is lost: {error}"}, lost=True)
        against = {int(rank): str(reason) for rank, reason in messages.unpacked(result).get("no", {}).items()}
        return Verdict(not against, against)

    def settle(
        self,
        name: str,
        mine: Mapping[str, Any],
        decide: Callable[[dict[int, dict[str, Any]]], Mapping[str, Any]],
        until: float,
        dead: Callable[[], set[int]] = set,
    ) -> dict[str, Any] | None:
        """One decision of any content, made by `decide` from what the ranks have said by then. Once a round
        and name. None where the store is lost; empty where `decide` failed."""

        def conclude(said: Sequence[bytes | None]) -> bytes:
            try:
                return messages.packed(
                    decide(
                        {rank: messages.unpacked(data) for rank, data in enumerate(said) if data is not None}
                    )
                )
            except Exception:  # as in agree()
                log.exception("Could not make a decision on %s", name)
                return messages.packed({})

        try:
            return messages.unpacked(
                self._settle(f"settle/{name}", messages.packed(mine), conclude, until, dead)
            )
        except errors.StoreLost as error:
            log.debug("Could not decide %s: %s", name, error)
            return None

    def veto(self, name: str, why: str) -> None:
        """Have a vote end in a no, unless it has ended already."""
        with contextlib.suppress(errors.StoreLost):
            self._store.claim(self._key(f"vote/{name}/decision"), messages.packed({"no": {self.rank: why}}))

    def _no(self, why: str) -> bytes | None:
        return messages.packed({"no": {self.rank: why}}) if why else None

    # ---- the register --------------------------------------------------------------------------------------

    def _settle(
        self,
        place: str,
        mine: bytes,
        conclude: Callable[[Sequence[bytes | None]], bytes],
        until: float,
        dead: Callable[[], set[int]],
        veto: Callable[[], bytes | None] = lambda: None,
    ) -> bytes:
        place = self._key(place)
        if self._publish(place, mine):
            said = self._read(place)
            if None not in said:
                return self._claim(place, conclude, said, dead())
        return self._await(place, conclude, until, dead, veto)

    def _publish(self, place: str, mine: bytes) -> bool:
        """True for the rank that completes the counter. What it counts has arrived: a connection keeps the
        order."""
        self._store.set(f"{place}/{self.rank}", mine)
        return self._store.add(f"{place}/count", 1) >= self.size

    def _read(self, place: str) -> list[bytes | None]:
        return self._store.get_many([f"{place}/{rank}" for rank in range(self.size)])

    def _await(
        self,
        place: str,
        conclude: Callable[[Sequence[bytes | None]], bytes],
        until: float,
        dead: Callable[[], set[int]],
        veto: Callable[[], bytes | None],
    ) -> bytes:
        attempts = overdue = 0
        at_once = bool(dead())  # survivors have little time: their launcher is about to stop them
        while True:
            wait = 0.0 if at_once else _TICK if overdue else min(_TICK, max(0.0, until - self._clock.now()))
            at_once = False
            decided = self._store.get(f"{place}/decision", wait)
            if decided is not None:
                return decided
            if (objection := veto()) is not None:
                return self._store.claim(f"{place}/decision", objection)
            late, gone = self._clock.now() >= until, dead()
            if not late and not (gone and self._store.add(f"{place}/count", 0) + len(gone) >= self.size):
                continue
            attempts += 1
            overdue += late
            # One rank reads for all, so that the traffic does not grow with the square; the others wait a
            # second for it, once.
            if self._store.add(f"{place}/attempt/{attempts}", 1) > 1 and overdue < 2:
                continue
            said = self._read(place)
            if late or all(data is not None or rank in gone for rank, data in enumerate(said)):
                return self._claim(place, conclude, said, gone)

    def _claim(
        self,
        place: str,
        conclude: Callable[[Sequence[bytes | None]], bytes],
        said: Sequence[bytes | None],
        gone: set[int],
    ) -> bytes:
        """A rank that died after it had answered cannot carry out what is decided now."""
        living = [None if rank in gone else data for rank, data in enumerate(said)]
        return self._store.claim(f"{place}/decision", conclude(living))

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"


def _sooner(notice: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    ours, theirs = notice.get("deadline"), held.get("deadline")
    if not isinstance(ours, int | float):
        return False
    return not isinstance(theirs, int | float) or ours <= theirs - _SOONER


def _objection(data: bytes | None) -> str | None:
    if data is None:
        return "did not answer in time"
    body = messages.unpacked(data)
    return None if body.get("ok") is True else str(body.get("why") or "no")
