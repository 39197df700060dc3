"""Which processes this one must not outlive, and whether one of them is gone: then it is an orphan, and
stops.

An orphan would continue as if nothing had happened: no process forwards notices to it or reads its exit code,
and a restart of the run starts a second one beside it. Three kinds of process above are meant: `lastcall
run`, torchrun's agent, and the parent of a multiprocessing child, which waits for its children when it ends
on its own. A shell is none of them: a user who types `nohup python train.py &` wants the process to outlive
the shell.

Discarded: PR_SET_PDEATHSIG (it reports the direct parent only, and the end of the thread that forked, which
may be any); a registry folder that has vanished (cleaning TMPDIR must not end a run).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing import process as multiprocessing
from typing import Any

from lastcall import messages, settings
from lastcall.core.process import registry
from lastcall.core.process.identity import Process
from lastcall.notices import ancestry

_RUN_ID = "TORCHELASTIC_RUN_ID"


class RequiredAncestors:
    """The processes that this one must not outlive, each with what it is in words."""

    def __init__(self, *elders: tuple[str, Process | None]) -> None:
        self._host = Process.own().host
        self._ancestors = [(what, process) for what, process in elders if process is not None]

    @classmethod
    def of_start(cls) -> RequiredAncestors:
        """Those that can be found only while they live: to be called as early as possible."""
        return cls(("torchrun", _agent()), ("the parent process", _parent()))

    def add_launcher(self, signed: Mapping[str, Any]) -> None:
        """`signed`: how `lastcall run` has introduced itself. It may be gone already. Of one on another host
        nothing can be said, and what makes no sense is no reason to stop."""
        try:
            process = Process(**signed)
        except TypeError:
            return
        if messages.typed(process) and process.host == self._host and not _hidden(process.pid):
            self._ancestors.append(("the launcher", process))

    def gone(self) -> str:
        """Which process is gone, in words; empty while all are alive."""
        return next(
            (
                f"{what} (process {process.pid}) is gone"
                for what, process in self._ancestors
                if process.gone(self._host)
            ),
            "",
        )


def _hidden(pid: int) -> bool:
    """Whether it is there and cannot be looked at: another user's process, where /proc is mounted with
    hidepid."""
    if registry.process_start(pid) is not None:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _parent() -> Process | None:
    parent = multiprocessing.parent_process()
    return None if parent is None or parent.pid is None else _process(parent.pid)


def _agent() -> Process | None:
    """torchrun names its run to its workers and has not got the name in its own environment: so it is the
    first ancestor without it. A worker may be started by a script in between."""
    run = settings.torchrun_id()
    if run is None:
        return None
    pid = os.getppid()
    while pid > 1 and ancestry.carries(pid, f"{_RUN_ID}={run}"):
        pid = ancestry.parent_of(pid)
    # 1: when it ends, the container does; or the agent was gone before
    return _process(pid) if pid > 1 else None


def _process(pid: int) -> Process | None:
    start = registry.process_start(pid)
    return None if start is None else Process(Process.own().host, pid, start)
