"""How `lastcall run` and the training processes below it find each other: small files in a folder that the
launcher made.

A training process joins with a file of its own and keeps it current; the launcher reads them to know which
processes to signal, how each one ended (torchrun turns every exit code into 1), and where the guardian finds
its snapshot. The other way goes one file, the notice: a session looks for it four times a second, and it
brings the deadline along, which no signal can. The launcher also writes down its own identity once, so that a
process that survives it can notice (`orphans`).

Discarded: a socket (the launcher may be restarted or gone, and a process that is killed must leave its last
word behind).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastcall import settings
from lastcall.storage import files as storage
from lastcall.types import Notice

_NOTICE = "notice.json"
_LAUNCHER = "launcher.json"
_REFUSED = "refused-{}.json"  # also written by auto/refusals.py


@dataclass(frozen=True)
class Member:
    """What a training process says of itself."""

    pid: int
    # when the process began, in the kernel's ticks: tells it from a later one with the same number
    started: int
    root: str  # the absolute directory of the run
    step: int = 0
    resumed: int | None = None  # the step that it resumed from
    outcome: str | None = None  # an Outcome, once it has ended
    checkpoint: str | None = None  # the folder that was committed last
    area: str | None = None  # the guardian's shared memory
    stays: str = ""  # why the same command would not resume from what was saved


def alive(member: Member) -> bool:
    """Whether the process still runs. A zombie does not: it has ended, and only its parent has not looked
    yet."""
    return process_start(member.pid) == member.started


def process_start(pid: int) -> int | None:
    """The start time of a running process; None where there is none, or only a zombie."""
    try:
        # The name in parentheses may hold anything, blanks and parentheses included.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


class Registry:
    """The launcher's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sign(self, process: Mapping[str, object]) -> None:
        """Write down which process keeps this registry."""
        _replace(self.folder / _LAUNCHER, process)

    def members(self) -> list[Member]:
        """All processes that have joined since the last clear(), the dead included, in order of their
        numbers."""
        found = []
        for path in self.folder.glob("member-*.json"):
            body = _read(path)
            try:
                found.append(Member(**body))
            except TypeError:  # half a file is impossible; one of another version of lastcall is not
                continue
        return sorted(found, key=lambda member: member.pid)

    def refusals(self) -> list[str]:
        """Why programs could not start, as far as they have said it."""
        said = [_read(path).get("because") for path in sorted(self.folder.glob(_REFUSED.format("*")))]
        return [why for why in said if isinstance(why, str)]

    def post(self, notice: Notice) -> None:
        """Post a notice to all members, also to those that join later. A later notice replaces an earlier
        one."""
        _replace(self.folder / _NOTICE, dataclasses.asdict(notice))

    def clear(self) -> None:
        """Forget the members and the notice: the next incarnation begins."""
        for path in (
            *self.folder.glob("member-*.json"),
            *self.folder.glob(_REFUSED.format("*")),
            self.folder / _NOTICE,
        ):
            path.unlink(missing_ok=True)


class Membership:
    """The training process's side. Nothing here raises: a launcher that is gone must not end a training
    run."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder = folder
        self._member = Member(os.getpid(), process_start(os.getpid()) or 0, str(root.absolute()))
        self._path = folder / f"member-{self._member.pid}.json"
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None

    @classmethod
    def of_environment(cls, root: Path) -> Membership | None:
        """None where no launcher has made a registry."""
        folder = settings.registry_folder()
        return None if folder is None else cls(folder, root)

    def update(self, **changes: Any) -> None:
        with self._lock:
            member = dataclasses.replace(self._member, **changes)
            if member == self._member and os.path.exists(self._path):
                return
            self._member = member
            try:
                _replace(self._path, dataclasses.asdict(member))
            except OSError:
                return

    def launcher(self) -> dict[str, Any]:
        """The process that keeps the registry, if that is known."""
        return _read(self._folder / _LAUNCHER)

    def notice(self) -> Notice | None:
        """The notice, each time a new one is posted; None otherwise."""
        path = self._folder / _NOTICE
        try:
            info = os.stat(path)
        except OSError:
            return None
        if self._seen == (info.st_mtime_ns, info.st_ino):
            return None
        self._seen = (info.st_mtime_ns, info.st_ino)
        try:
            return Notice(**_read(path))
        except TypeError:
            return None


def refuse(folder: Path, why: str) -> None:
    """This process could not start, and starting it again would not help."""
    with contextlib.suppress(OSError):
        _replace(folder / _REFUSED.format(os.getpid()), {"because": why})


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _replace(path: Path, body: Mapping[str, Any]) -> None:
    storage.replace_small(path, json.dumps(body).encode())
