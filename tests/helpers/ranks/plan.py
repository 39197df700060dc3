"""What the rank scripts are told, and what they tell: shared by the scripts of tests/e2e/ranks and the
harness that runs them.

A script gets its plan as JSON in RANKS_PLAN. It writes what happens to it, line by line, into
RANKS_FOLDER/rank-R.jsonl, with times on the monotonic clock, which all processes of the machine share: so a
test knows what a rank was doing when a signal was sent to it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLAN, FOLDER, HOST = "RANKS_PLAN", "RANKS_FOLDER", "RANKS_HOST"
# CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS
_NEW_NETWORK, _NEW_NAMES, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000
_PRIVATE, _BIND = 0x44000, 0x1000  # MS_REC | MS_PRIVATE, MS_BIND


@dataclass(frozen=True)
class Fault:
    """What a rank does to itself, once in the whole life of a run: `kind` is kill, stop, segfault or
    exception."""

    kind: str
    rank: int
    step: int
    # or "backward", "optimizer", "end": after which part of the step; "inside": in optimizer.step(), half
    # done
    where: str = "forward"


@dataclass(frozen=True)
class Plan:
    """The shape of a run. Seconds are of sleep: moments at which a signal may fall."""

    steps: int = 30
    seconds: float = 0.01  # in every step, before the forward
    slow: Mapping[int, float] = field(default_factory=dict)  # rank: more seconds in every step
    # rank: seconds before protect(), "still importing"
    late: Mapping[int, float] = field(default_factory=dict)
    # rank: seconds in the last step, after its collectives
    tail: Mapping[int, float] = field(default_factory=dict)
    # manual.py; rank: steps more than the others do, without collectives
    extra: Mapping[int, int] = field(default_factory=dict)
    # step: seconds of an evaluation in it, the first time that it is reached
    pauses: Mapping[int, float] = field(default_factory=dict)
    pausing: Sequence[int] | None = None  # the ranks that evaluate; None: all
    fault: Fault | None = None
    accumulate: int = 1
    width: int = 48
    # keep a value that is another on each rank and changes in every step: nobody else can save it
    personal: bool = False
    mesh: str = "flat"  # fsdp.py: flat, or hybrid for two replicas
    digests: bool = False  # of the whole state after every step: for reference runs
    disk_seconds: float = 0.0  # every fsync takes so much longer

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def read_plan() -> Plan:
    body: dict[str, Any] = json.loads(os.environ.get(PLAN, "{}"))
    for name in ("slow", "late", "tail", "extra", "pauses"):
        body[name] = {int(key): value for key, value in body.get(name, {}).items()}
    fault = body.pop("fault", None)
    return Plan(fault=Fault(**fault) if fault else None, **body)


@dataclass(frozen=True)
class Event:
    """A line of a journal. `what` is one of

    start       the process is there
    joined      the process group is there
    protected   inside the block of protect(); `step` is where it goes on from
    at          a step begins; `data` names the samples of its batch
    evaluating  an evaluation begins
    did         a step has ended; `state`, if asked for, is a digest of everything
    left        the block was left without an exception
    done        the end; `state` has the digests
    """

    what: str
    at: float
    pid: int
    step: int = -1
    data: str = ""
    state: Mapping[str, str] = field(default_factory=dict)
    restart: int = 0


class Journal:
    """The script's side."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.folder = Path(os.environ.get(FOLDER, "."))
        path = self.folder / f"rank-{rank}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.say("start", restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    def say(self, what: str, **more: Any) -> None:
        line = {"what": what, "at": time.monotonic(), "pid": os.getpid(), **more}
        os.write(self._fd, (json.dumps(line) + "\n").encode())  # one write: a SIGKILL leaves whole lines

    def first_time(self, name: str) -> bool:
        """Whether this was never asked before in any life of this run."""
        try:
            os.close(os.open(self.folder.parent / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def strike(self, fault: Fault | None, step: int, where: str) -> None:
        """Do it if this is the rank, the step and the place, and if it was never done before."""
        if fault is None or (fault.rank, fault.step, fault.where) != (self.rank, step, where):
            return
        if not self.first_time("fault"):
            return
        self.say("fault", step=step)
        if fault.kind == "exception":
            raise ValueError("the fault that was asked for")
        if fault.kind == "segfault":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)


def journal(folder: Path, rank: int) -> list[Event]:
    """What a rank has written so far, in order; whole lines only."""
    path = folder / f"rank-{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [Event(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def move() -> None:
    """Go to the host that RANKS_HOST=NAME:FILE names (helpers/ranks/hosts.py), as the shell of a started
    process does. For forked ranks."""
    if HOST not in os.environ:
        return
    name, _, names = os.environ[HOST].partition(":")
    network = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    _call("setns", network, _NEW_NETWORK)
    os.close(network)
    _call("unshare", _NEW_NAMES | _NEW_MOUNTS)
    socket.sethostname(name)
    _call("mount", None, b"/", None, _PRIVATE, None)
    _call("mount", names.encode(), b"/etc/hosts", None, _BIND, None)
    _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")
