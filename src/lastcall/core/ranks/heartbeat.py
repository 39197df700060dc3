"""Which ranks are alive and make progress: every rank's heartbeat in the store, and the two lowest ranks that
monitor them all.

A heartbeat comes from a side thread, so it continues while training waits in a collective: in lockstep one
stuck rank stops all of them, and its silence distinguishes it from its victims.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from lastcall import clock as clocks
from lastcall import errors, messages
from lastcall.core.process.identity import Process
from lastcall.core.store import Store

log = logging.getLogger("lastcall")
LOST = "lost"  # sources of a notice: a rank is gone or has failed
HANG = "hang"  # ... a rank makes no progress
HANG_SECONDS = 30.0
WATCHERS = 2  # the lowest ranks: two, because one of them may be the one that hangs
_BEAT = 1.0
_LOOK = 3  # beats between two looks
_ASLEEP = 15.0  # seconds between two looks of a monitor that was itself stopped
_USUAL = 10.0  # so many times the longest usual step is still no hang
_REMEMBERED = 64  # steps that count as usual
_EARLY_SILENCE, _EARLY_STANDSTILL = 4.0, 40.0  # times hang_seconds, while it is unknown how long a step takes


@dataclass(frozen=True)
class Beat:
    """What a rank publishes once a second."""

    beat: int
    step: int
    host: str = ""
    pid: int = 0
    started: int = 0
    busy: str = (
        # what it does instead of steps: evaluating, saving. It excuses no silence: heartbeats do not come
        # from the training thread
        ""
    )
    failed: str = ""  # the exception that ended its training
    finished: bool = False  # it has exited in order

    def to_bytes(self) -> bytes:
        return messages.packed({name: value for name, value in asdict(self).items() if value})

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Beat | None:
        """None for an invalid beat."""
        if data is None:
            return None
        try:
            found = cls(**{"beat": 0, "step": 0, **messages.unpacked(data)})
        except TypeError:
            return None
        return found if found.beat and messages.typed(found) else None


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, with which ranks, and why. No ranks: the cause cannot be told from its victims."""

    kind: Literal[
        "dead",  # the process is gone, or its training has failed
        "frozen",  # no heartbeat, and no rank makes progress
        "stuck",  # all are alive, and none makes progress
        "silent",  # no heartbeat, but training progresses (so far): worth a line in the log, no more
    ]
    ranks: tuple[int, ...]
    because: str


# ---- a rank's own side -------------------------------------------------------------------------------------


class Heartbeat:
    """Publishes this rank's progress once a second. Never raises: a lost store is a silence, which the others
    judge."""

    def __init__(self, store: Store, rank: int, process: Process | None = None) -> None:
        self._store = store
        self._key = f"pulse/{rank}"
        self._process = process or Process.own()
        self._lock = threading.Lock()
        self._latest = Beat(0, 0, self._process.host, self._process.pid, self._process.started)

    def beat(self, step: int, busy: str = "") -> None:
        self._say(step=step, busy=busy)

    def fail(self, why: str) -> None:
        """Training has raised here. Published at once, and with every later beat."""
        self._say(failed=why)

    def finish(self) -> None:
        """This rank exits in order: its silence means nothing from now on."""
        self._say(finished=True)

    def _say(self, **changes: object) -> None:
        with self._lock:  # a beat that overtakes a failure would hide it
            said = {**asdict(self._latest), **changes, "beat": self._latest.beat + 1}
            self._latest = Beat(**said)
            try:
                self._store.set(self._key, self._latest.to_bytes())
            except errors.StoreLost:
                return


class Peers:
    """The other ranks of this host, by their processes: their death is seen without any store."""

    def __init__(self, table: Mapping[int, Process], host: str) -> None:
        self.table = dict(table)
        self._host = host

    @staticmethod
    def register(store: Store, rank: int, process: Process) -> None:
        """Before the ranks meet at the start. Each reads only its own host, so that no rank reads
        everything."""
        place = store.add(f"host/{process.host}", 1)
        store.set(f"host/{process.host}/{place}", json.dumps([rank, process.pid, process.started]).encode())

    @classmethod
    def of_host(cls, store: Store, process: Process, *, all_of_them: bool = False) -> Peers:
        """After the ranks have met. A process that cannot be seen from here is left out: its state is
        unknown; unless `all_of_them` are wanted, as by ranks that still wait for each other."""
        count = store.add(f"host/{process.host}", 0)
        table = {}
        for data in store.get_many([f"host/{process.host}/{place}" for place in range(1, count + 1)]):
            try:
                rank, pid, started = map(int, json.loads(data or b""))
            except (ValueError, TypeError):
                continue
            peer = Process(process.host, pid, started)
            if pid != process.pid and (all_of_them or not peer.gone(process.host)):
                table[rank] = peer
        return cls(table, process.host)

    def gone(self) -> set[int]:
        return {rank for rank, process in self.table.items() if process.gone(self._host)}


# ---- the watch ---------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """One rank as the monitor has seen it, on the monitor's own clock: the clocks of hosts differ."""

    since: float  # its beat has not changed since then
    beat: Beat = field(default_factory=lambda: Beat(-1, -1))


@dataclass
class Progress:
    """What a monitor remembers between two looks."""

    size: int
    hang_seconds: float = HANG_SECONDS
    # the step that all ranks began at, and when: what was done before the first look tells how long a step
    # takes
    base: int = -1
    began: float = 0.0
    ranks: dict[int, _Seen] = field(default_factory=dict)
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # seconds that steps took
    still_since: float = 0.0  # the last time that there was progress, or none was expected
    looked: float | None = None
    stepped: bool = False

    @property
    def threshold(self) -> float:
        return max(self.hang_seconds, _USUAL * max(self.usual, default=0.0))

    @property
    def limits(self) -> tuple[float, float]:
        """How long a rank may send no heartbeat, and how long all may make no progress. While it is unknown
        how long a step takes both are generous: a first step compiles, and may do so for minutes, but it does
        not stop a rank's heartbeat."""
        if self.usual:
            return self.threshold, self.threshold
        return _EARLY_SILENCE * self.hang_seconds, _EARLY_STANDSTILL * self.hang_seconds

    def take(self, beats: Mapping[int, Beat], now: float) -> None:
        """Remember what was read at `now`. A monitor that was frozen itself starts from scratch: the others
        did not stand still."""
        anew = self.looked is None or now - self.looked > _ASLEEP
        before = self._furthest()
        for rank in range(self.size):
            seen, beat = self.ranks.setdefault(rank, _Seen(now)), beats.get(rank)
            if anew or (beat is not None and beat != seen.beat):
                self.ranks[rank] = _Seen(now, beat or seen.beat)
        steps = self._furthest() - before
        busy = any(seen.beat.busy and now - seen.since < self.threshold for seen in self.ranks.values())
        if self.looked is None and self.base >= 0 and steps > 1 and not busy:
            self.usual.append((now - self.began) / steps)
            self.stepped = True
        elif steps > 0 and before >= 0 and not busy and not anew:
            if self.stepped:  # the first one is not usual: compilation, warming up
                self.usual.append((now - self.still_since) / steps)
            self.stepped = True
        if steps > 0 or busy or anew:
            self.still_since = now
        self.looked = now

    def _furthest(self) -> int:
        return max((seen.beat.step for seen in self.ranks.values()), default=self.base)


def judge(progress: Progress, now: float, host: str) -> Diagnosis | None:
    """The worst diagnosis; None while all is well, or nothing is known yet."""
    ranks = {rank: seen for rank, seen in progress.ranks.items() if not seen.beat.finished}
    failed = {rank: seen.beat.failed for rank, seen in ranks.items() if seen.beat.failed}
    if failed:
        first = min(failed)
        return Diagnosis(
            "dead",
            tuple(failed),
            f"the training of {messages.named(failed)} failed; rank {first}: {failed[first]}",
        )
    gone = tuple(
        r for r, seen in ranks.items() if Process(seen.beat.host, seen.beat.pid, seen.beat.started).gone(host)
    )
    if gone:
        return Diagnosis("dead", gone, f"the process of {messages.named(gone)} is gone")
    silence, standstill = progress.limits
    silent = tuple(rank for rank, seen in ranks.items() if now - seen.since >= silence)
    still = now - progress.still_since
    if silent and len(silent) < len(ranks) and still < silence:
        return Diagnosis(
            "silent",
            silent,
            f"{messages.named(silent)} sent no heartbeat for {silence:.0f} s; the others make progress",
        )
    if silent:
        because = (
            f"{messages.named(silent)} sent no heartbeat for {silence:.0f} s, and no rank makes progress"
        )
        return Diagnosis("frozen", silent, because)
    if ranks and still >= standstill:
        return _stuck(ranks, f"no rank has completed a step for {standstill:.0f} s")
    return None


def _stuck(ranks: Mapping[int, _Seen], what: str) -> Diagnosis:
    steps = {rank: seen.beat.step for rank, seen in ranks.items()}
    lowest, highest = min(steps.values()), max(steps.values())
    if lowest == highest:
        return Diagnosis(
            "stuck",
            (),
            f"{what}; all are alive and at step {lowest}: the cause cannot be told from its victims",
        )
    behind = tuple(rank for rank, step in steps.items() if step == lowest)
    return Diagnosis(
        "stuck",
        behind,
        f"{what}; {messages.named(behind)} stopped at step {lowest}, others reached {highest}",
    )


class Monitor:
    """Reads every heartbeat and returns a diagnosis. For one thread, which has its own connection to the
    store."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        clock: clocks.Clock,
        hang_seconds: float = HANG_SECONDS,
        base: int = -1,
    ) -> None:
        self._store = store
        self._keys = [f"pulse/{number}" for number in range(size)]
        self._rank = rank
        self._clock = clock
        self._host = Process.own().host
        self.progress = Progress(size, hang_seconds, base, clock.now())

    @property
    def on_duty(self) -> bool:
        return self._rank < WATCHERS

    def look(self) -> Diagnosis | None:
        """StoreLost if nothing can be read any more."""
        beats = ((rank, Beat.from_bytes(data)) for rank, data in enumerate(self._store.get_many(self._keys)))
        now = self._clock.now()
        self.progress.take({rank: beat for rank, beat in beats if beat is not None}, now)
        return judge(self.progress, now, self._host)


class HeartbeatThread:
    """The thread behind both: a beat a second, and, on the ranks that monitor, a look every few of them. Each
    diagnosis is reported once.

    Heartbeat and monitor have connections of their own: a failure of training is published at once, also
    while the monitor reads. `found` returns at once, too: while it runs, this rank sends no heartbeat.
    """

    def __init__(
        self,
        pulse: Heartbeat,
        watch: Monitor | None,
        progress: Callable[[], tuple[int, str]],
        found: Callable[[Diagnosis], None],
    ) -> None:
        self._pulse = pulse
        self._watch = watch if watch is not None and watch.on_duty else None
        self._progress = progress
        self._found = found
        self._told: tuple[str, tuple[int, ...]] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lastcall-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * _BEAT)

    def _run(self) -> None:
        beats = 0
        while not self._closed.is_set():
            self._pulse.beat(*self._progress())
            beats += 1
            if self._watch is not None and beats % _LOOK == 0:
                self.look()
            self._closed.wait(_BEAT)

    def look(self) -> None:
        assert self._watch is not None
        try:
            finding = self._watch.look()
        except errors.StoreLost as error:
            log.warning("The other ranks are no longer monitored: %s", error)
            self._watch = None
            return
        told = None if finding is None else (finding.kind, finding.ranks)
        if finding is not None and told != self._told:
            self._found(finding)
        self._told = told
