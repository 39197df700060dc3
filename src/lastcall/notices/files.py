"""A stop file: creating it stops the run. For a Kubernetes preStop hook, an operator, or a person.

It is polled, since inotify does not see changes by another machine on a network file system.

A file that already exists at the start is a leftover of an earlier stop: treating it as a notice would stop
every incarnation at its first step. It counts once it is touched, written or created again. If the
environment names the file (LASTCALL_STOP_FILE), it is a leftover if it is older than the first process with
that environment: a container's first process. So a hook that runs while Python is still importing counts, and
a container that is restarted in its pod ignores the file that ended the one before.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from lastcall import clock as clocks
from lastcall.notices import ancestry, polling
from lastcall.notices.polling import log

VARIABLE = "LASTCALL_STOP_FILE"
_MOST_BYTES = 64 * 1024
_LONGEST_REASON = 200
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True)
class Content:
    grace: float | None = None
    reason: str = ""
    wrong: str = ""  # why it could not be parsed


class StopFile(polling.Poller):
    name = "stop-file"
    interval = 0.2
    most = 1.0

    def __init__(self, path: Path, clock: clocks.Clock | None = None, since: float = math.inf) -> None:
        """`since`: in seconds since 1970; a file that was written then or later is a notice, even if it
        exists at the start."""
        super().__init__(clock)
        self.path = path.absolute()
        self._since = since
        self.title = f"the stop file {self.path}"
        self._known: tuple[int, int] | None = None  # the version at the start, or the last one reported
        self._seen: float | None = None  # when the first unreported version was seen

    @classmethod
    def named(cls, path: str, clock: clocks.Clock | None = None) -> StopFile:
        """The one that a setting names."""
        return cls(Path(path), clock, ancestry.began_with(VARIABLE, path))

    def begin(self) -> None:
        self._seen = None
        try:
            self._known = self._version()
        except polling.Trouble:
            self._known = None  # look() reports it
        if self._known is not None and self._known[0] >= self._since * 1e9:
            self._known = None
        elif self._known is not None:
            log.warning(
                "The stop file %s existed before this run: it counts once it is touched or created again. To "
                "remove it: rm '%s'",
                self.path,
                self.path,
            )

    def look(self) -> float:
        version = self._version()
        if version is None:
            self._known = self._seen = None
        elif version != self._known:
            self._arrived(version)
        return self.interval

    def _arrived(self, version: tuple[int, int]) -> None:
        fresh = self._seen is None
        if self._seen is None:
            self._seen = self.clock.now()
        content = self._read()
        if fresh and (content.wrong or content == Content()):
            return  # a shell creates the file first and writes into it afterwards: check once more
        at, self._seen, self._known = self._seen, None, version
        if content.wrong:
            log.warning(
                "The stop file %s %s: a notice without a deadline. Leave it empty, or write seconds or "
                '{"grace": 30} into it',
                self.path,
                content.wrong,
            )
        reason = f"stop file {self.path}" + (f" ({content.reason})" if content.reason else "")
        self.tell(reason, None if content.grace is None else at + content.grace, at)

    def _version(self) -> tuple[int, int] | None:
        try:
            info = os.stat(self.path)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise polling.Trouble(f"stat {error.errno}", f"cannot be checked: {error.strerror}") from error
        return info.st_mtime_ns, info.st_ino

    def _read(self) -> Content:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block us
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return Content(wrong="is not a regular file")
                return understand(os.read(fd, _MOST_BYTES + 1))
            finally:
                os.close(fd)
        except OSError as error:
            return Content(wrong=f"cannot be read ({error.strerror})")


def understand(body: bytes) -> Content:
    """The content of a stop file: nothing, seconds of grace, or {"grace": 30, "reason": "..."}."""
    if len(body) > _MOST_BYTES:
        return Content(wrong=f"contains more than {_MOST_BYTES // 1024} KB")
    try:
        text = body.decode().strip()
        if not text:
            return Content()
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Content(wrong="contains neither seconds nor JSON")
    if not isinstance(value, dict):
        value = {"grace": value}
    reason = value.get("reason", "")
    reason = " ".join(reason.split())[:_LONGEST_REASON] if isinstance(reason, str) else ""
    grace = value.get("grace")
    if grace is None and "grace" not in value:
        return Content(reason=reason)
    if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < math.inf:
        return Content(reason=reason, wrong="has a grace that is not a number of seconds")
    return Content(float(grace), reason)
