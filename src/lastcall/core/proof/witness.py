"""What `lastcall drill --prove` asks of a training process: digests of its whole state at each of the first
boundaries, and a notice at a given step. The drill compares the digests of an uninterrupted run with those of
a preempted one.

A proof works in a scratch directory: nothing of the run's own directory, mirror or ports is touched. It is
asked for by a folder (`LASTCALL_PROOF`) with a plan in it, and the testimony of each rank is written beside
the plan.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lastcall import settings
from lastcall.core.engine import digest
from lastcall.core.proof import pieces
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Capture, Notice

log = logging.getLogger("lastcall")
_PLAN = "plan.json"
_PATIENCE = 30.0  # seconds that a boundary waits for the notice to arrive


@dataclass(frozen=True)
class ProofPlan:
    steps: int  # the last recorded step; then the process waits until the drill ends it
    # the step at which each incarnation gets a notice; the one after the last gets none
    notices: tuple[int, ...]
    drill: int  # the process of the drill: without it nothing ends this one

    def write(self, folder: Path) -> None:
        (folder / _PLAN).write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Statement:
    """One boundary of one rank."""

    rank: int
    world: int
    incarnation: int
    step: int
    epoch: int
    # every piece of the state, and its digest, or the value itself where it is short
    names: Mapping[str, str]
    done: bool = False  # the last one: the process waits to be ended

    @property
    def boundary(self) -> tuple[int, int]:
        return self.step, self.epoch


def asked() -> Path | None:
    """The folder of the proof that this process is part of."""
    return settings.proof_folder()


def redirected(directory: Path) -> Path:
    """Where the run of a proof keeps its checkpoints; `directory` where this is none."""
    folder = asked()
    return directory if folder is None else folder / "runs" / digest.of(str(directory).encode())[:8]


def adjusted(jit: JITCheckpointConfig) -> JITCheckpointConfig:
    """A proof does not wait before it saves, and reaches nothing outside its folder."""
    if asked() is None:
        return jit
    return settings.changed(
        jit,
        kill_wait=0.0,
        mirror=None,
        progress_port=None,
        progress_push=False,
        stop_file=None,
        directory=str(redirected(Path())),
    )


def statements(folder: Path) -> list[Statement]:
    """What all ranks have recorded so far, each in its own order."""
    found = []
    for path in sorted(folder.glob("witness-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                found.append(Statement(**json.loads(line)))
            except (ValueError, TypeError):
                # a line that is being written, or was when the process was killed
                continue
    return found


class Witness:
    """`notify` takes a notice, where no signal is listened to."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        incarnation: int,
        jit: JITCheckpointConfig,
        notify: Callable[[Notice], None],
    ) -> None:
        self._plan = _read(folder)
        self._incarnation = incarnation
        self._jit = jit
        self._notify = notify
        self._path = folder / f"witness-{rank}.jsonl"
        self._rank, self._world = rank, world
        self._told = False

    @classmethod
    def of_environment(
        cls,
        rank: int,
        world: int,
        incarnation: int,
        jit: JITCheckpointConfig,
        notify: Callable[[Notice], None],
    ) -> Witness | None:
        folder = asked()
        return None if folder is None else cls(folder, rank, world, incarnation, jit, notify)

    def look(
        self, boundary: tuple[int, int], capture: Callable[[], Capture], heard: Callable[[], bool]
    ) -> None:
        """At every boundary, before a notice is answered there. `heard`: whether this boundary will answer
        one."""
        step, epoch = boundary
        last = step >= self._plan.steps
        self._state(step, epoch, capture(), last)
        stop = (
            self._plan.notices[self._incarnation - 1]
            if self._incarnation <= len(self._plan.notices)
            else None
        )
        if stop is not None and step >= stop:
            self._preempt(heard)
        elif last:
            log.info("Step %d: the proof is complete; the drill will end this process", step)
            while _alive(self._plan.drill):
                time.sleep(0.1)
            os._exit(1)

    def _state(self, step: int, epoch: int, capture: Capture, last: bool) -> None:
        names = pieces.named(capture, pieces.whole)
        line = asdict(Statement(self._rank, self._world, self._incarnation, step, epoch, names, last))
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)

    def _preempt(self, heard: Callable[[], bool]) -> None:
        """A real signal, between this boundary and the next; the next one waits until it has arrived, however
        short the steps are."""
        if not self._told:
            self._told = True
            if self._rank == 0:
                names = self._jit.signals
                if names:
                    os.kill(os.getpid(), signal.Signals[names[0]])
                else:
                    now = time.monotonic()
                    self._notify(Notice("drill", "lastcall drill --prove", now, now + self._jit.grace))
            return
        until = time.monotonic() + _PATIENCE
        while not heard() and time.monotonic() < until:
            time.sleep(0.005)


def _read(folder: Path) -> ProofPlan:
    body: dict[str, Any] = json.loads((folder / _PLAN).read_text())
    return ProofPlan(int(body["steps"]), tuple(int(step) for step in body["notices"]), int(body["drill"]))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
