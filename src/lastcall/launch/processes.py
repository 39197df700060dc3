"""The processes below this one, from /proc: the tree, and what each process is."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lastcall.core.process import registry

_PR_SET_CHILD_SUBREAPER = 36
_AGENTS = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
# Programs whose processes are not below them, or have a launcher of their own: what is protected there is
# unknown here.
_ELSEWHERE = {"lastcall", "srun", "ssh", "docker", "podman", "kubectl", "ray", "raylet"}
# Python's own helper processes; each is ended by the process that it serves.
_SERVANT = re.compile(r"\bmultiprocessing\.(spawn|forkserver|resource_tracker|semaphore_tracker)\b")
# options of the interpreter whose value is a word of its own
_VALUED = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True)
class LiveProcess:
    pid: int
    parent: int
    started: int  # with the pid, what tells it from a later process of the same number
    argv: tuple[str, ...]

    @property
    def is_python(self) -> bool:
        return (
            bool(self.argv)
            and re.fullmatch(r"(python|pypy)[\d.]*", os.path.basename(self.argv[0])) is not None
        )

    @property
    def is_agent(self) -> bool:
        """Whether it starts the ranks of a run, and takes SIGTERM as the order to stop them."""
        program, rest = program_of(self.argv)
        return program in _AGENTS or (program == "accelerate" and rest[:1] == ("launch",))


def become_subreaper() -> bool:
    """Become a subreaper: orphans get this process as their parent instead of PID 1, so training survives the
    death of an intermediate shell."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def below(pid: int) -> dict[int, LiveProcess]:
    """The living descendants of a process, zombies left out. A zombie has no children: they were reparented
    when it died."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (known := _family(int(entry.name))) is not None:
            parents[int(entry.name)] = known
    found: dict[int, LiveProcess] = {}
    generation = {pid}
    while generation:
        children = {
            child
            for child, (parent, _) in parents.items()
            if parent in generation and child not in found and child != pid
        }
        for child in children:
            parent, started = parents[child]
            found[child] = LiveProcess(child, parent, started, _argv(child))
        generation = children
    return found


def is_servant(process: LiveProcess, tree: Mapping[int, LiveProcess]) -> bool:
    """Whether a Python process works for another one: a DataLoader worker, a multiprocessing helper. A signal
    of ours would take it away from a parent that still needs it; when the parent goes, it goes too.

    A forked one has its parent's command line; nothing else tells it from its parent.
    """
    parent = tree.get(process.parent)
    if any(_SERVANT.search(word) for word in process.argv):
        return True
    return parent is not None and process.is_python and process.argv == parent.argv


def has_agent_above(pid: int, tree: Mapping[int, LiveProcess]) -> bool:
    process = tree.get(pid)
    while process is not None and (process := tree.get(process.parent)) is not None:
        if process.is_agent:
            return True
    return False


def is_elsewhere(process: LiveProcess) -> bool:
    """Whether what it runs is out of sight: on other machines, in other containers, in a Ray cluster, below a
    launcher of its own."""
    return program_of(process.argv)[0] in _ELSEWHERE or (
        process.is_python and has_loaded(process.pid, "_raylet")
    )


def has_loaded(pid: int, library: str) -> bool:
    """Whether a shared library whose name contains this is in its memory."""
    try:
        return any(
            library in line.rpartition("/")[2]
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        )
    except OSError:
        return False


def carries(process: LiveProcess, name: str, value: str) -> bool:
    """Whether this was in its environment when it started."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def catches(pid: int, signum: int) -> bool:
    """Whether it has a handler for the signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


def send(processes: Iterable[LiveProcess], signum: int) -> list[int]:
    """Signal these, the oldest first: a shell whose child gets the signal before it would continue with the
    next command of its script. Returns the processes that got it; one that has ended meanwhile is not an
    error."""
    reached = []
    for process in sorted(processes, key=lambda process: process.started):
        if registry.process_start(process.pid) != process.started:
            continue
        try:
            os.kill(process.pid, signum)
            reached.append(process.pid)
        except (ProcessLookupError, PermissionError):
            # the latter: a set-uid program, which this user may not signal
            continue
    return reached


def program_of(argv: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """What runs, and its arguments: of `python -u -m torch.distributed.run x.py`, the module; of `python
    /bin/torchrun`, the script."""
    if not argv:
        return "", ()
    first = os.path.basename(argv[0])
    if re.fullmatch(r"(python|pypy)[\d.]*", first) is None:
        return first, argv[1:]
    words = iter(range(1, len(argv)))
    for index in words:
        word = argv[index]
        if word == "-m":
            return "".join(argv[index + 1 : index + 2]), argv[index + 2 :]
        if word == "-c":
            return "", ()
        if word in _VALUED:
            next(words, None)
        elif not word.startswith("-"):
            return os.path.basename(word), argv[index + 1 :]
    return first, ()


def names(processes: Collection[int]) -> str:
    """For the log: "process 7", "processes 7, 8"."""
    if not processes:
        return "no process"
    return ("process " if len(processes) == 1 else "processes ") + ", ".join(map(str, sorted(processes)))


def described(status: int) -> str:
    """A return code in words, negative for a signal."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _family(pid: int) -> tuple[int, int] | None:
    """Parent and start time; None for a zombie and for what is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else (int(fields[1]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def _argv(pid: int) -> tuple[str, ...]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(word.decode(errors="replace") for word in raw.split(b"\0")[:-1])


def is_stopped(pid: int) -> bool:
    """Whether it was stopped (SIGSTOP, a debugger, a frozen container) and not continued."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in (
            "T",
            "t",
        )
    except (OSError, IndexError):
        return False
