"""From SIGTERM at one rank to a checkpoint of all of them: real processes with a real session each, and no
model.

`python -m bench.ranks.notices RANKS ROUNDS PORT SECRET FOLDER`: the ranks are forked from one process, since
64 that import for themselves take longer to start than to be measured. Every rank takes steps of 20 ms: up to
two of them are the way to the boundary.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from lastcall import errors, memory, settings
from lastcall.core import session as sessions
from lastcall.core.context import RunContext
from lastcall.core.notice.inbox import Inbox
from lastcall.core.ranks.world import World
from lastcall.core.store import Scoped, client
from lastcall.core.subject import Loading, Stored
from lastcall.notices.signals import SignalListener
from lastcall.types import Capture, Group, Notice, TensorEntry

STEP_S = 0.02
_GRACE = 30.0
_BYTES = 4096
_WARM_UP = 10  # steps before the signal: the ranks are past what is prepared after the first


class Counter:
    """A state of one page. Nothing of it changes: what is measured is the way to its save."""

    step_seconds = STEP_S
    settled = True
    loads_by_itself = False
    began = 0.0  # when it was last captured to be saved

    def __init__(self) -> None:
        self.step = 0
        self.due = 0
        buffer = memory.PageBuffer(_BYTES)
        live = memory.HostMemory(buffer.address, _BYTES, buffer)
        self._group = Group("model", (TensorEntry("own", "U8", (_BYTES,), live),))

    @property
    def boundary(self) -> tuple[int, int]:
        return self.step, 0

    @property
    def ordinal(self) -> int:
        return self.step

    def numbers(self) -> dict[str, float]:
        return {}

    def outline(self) -> Capture:
        return Capture(self.step, {"step": self.step}, (self._group,))

    def capture(self) -> Capture:
        self.began = time.monotonic()
        return self.outline()

    def rescue(self) -> Capture:
        return self.capture()

    def behind_gate(self) -> Capture:
        return self.capture()

    def untouched(self) -> bool:
        return True

    def unrescuable(self) -> str:
        return ""

    def copy_every_boundary(self) -> None:
        self.due = 0

    def retry_copy(self) -> None:
        return

    def stop_at_next_boundary(self) -> None:
        self.due = 0

    def join(self, run: str, incarnation: int, folder: Path) -> None:
        return

    def holdings(self) -> tuple[tuple[int, ...], ...]:
        return ()

    def unreplicated_digest(self) -> str:
        return ""

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        return None

    def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
        raise errors.MismatchError("every round has a directory of its own")


def rank_main(rank: int, size: int, folder: Path, store: tuple[int, str, str], ready: int, said: int) -> None:
    """One life: train, be told, save, say when."""
    port, secret, scope = store
    world = World(rank, size, lambda: Scoped(client.StoreClient("127.0.0.1", port, secret), scope))
    jit = settings.JITCheckpointConfig(kill_wait=0, grace=_GRACE, spare=False, huge_pages=False, threads=1)
    subject = Counter()
    context = RunContext.create(folder, subject, jit, settings.PeriodicCheckpointConfig(), world=world)
    inbox = Inbox.of_run(context)

    def on_signal(signum: int, count: int) -> None:
        now = context.clock.now()
        inbox.notify(Notice("signal", signal.Signals(signum).name, now, now + _GRACE, signum))

    listener = SignalListener(jit.signals, on_signal)
    listener.start()
    session = sessions.begin(context, inbox)
    try:
        while True:
            time.sleep(STEP_S)
            subject.step += 1
            if subject.step == _WARM_UP:
                os.write(ready, b".")
            if subject.step >= subject.due:
                session.at_boundary()
                subject.due = subject.step + 1
    except errors.Preempted:
        ended = time.monotonic()
    session.stop()
    listener.stop()
    # short enough to be written at once
    os.write(said, json.dumps([rank, subject.began, ended]).encode() + b"\n")


def life(size: int, folder: Path, store: tuple[int, str, str], told: int) -> tuple[float, float]:
    """Seconds from the signal to the moment at which the last rank began to save, and to that at which the
    last one had saved."""
    ready, tell_ready = os.pipe()
    said, say = os.pipe()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_main(rank, size, folder, store, tell_ready, say)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    os.close(tell_ready)
    os.close(say)
    there = 0
    while there < size:
        came = len(os.read(ready, size))
        if not came:
            raise RuntimeError("a rank died before its first steps")
        there += came
    sent = time.monotonic()
    os.kill(children[told], signal.SIGTERM)
    with os.fdopen(said) as file:
        times = [json.loads(line) for line in file]
    os.close(ready)
    for child in children:
        os.waitpid(child, 0)
    if len(times) < size or not all(began for _, began, _ in times):
        raise RuntimeError(f"only {len(times)} of {size} ranks saved")
    return max(began for _, began, _ in times) - sent, max(ended for _, _, ended in times) - sent


def main(size: int, rounds: int, port: int, secret: str, folder: Path) -> None:
    chosen = random.Random(size)
    lives = [
        life(size, folder / f"{size}-{number}", (port, secret, f"{size}/{number}/"), chosen.randrange(size))
        for number in range(rounds)
    ]
    print(json.dumps(lives))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
