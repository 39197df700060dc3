"""Which incarnation owns a directory. The lock keeps a second run out for as long as the leader's process
lives; the token also keeps out the remains of an incarnation whose leader is gone: orphans, a frozen rank
that wakes up, a host that was cut off."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from lastcall import errors
from lastcall.storage import files as storage

NAME = "owner.json"
_LARGEST = 64 * 1024


class Fence:
    def __init__(self, private: Path, token: str) -> None:
        self._path = private / NAME
        self.token = token

    @classmethod
    def take(cls, private: Path, incarnation: int) -> Fence:
        """This incarnation owns the directory from now on. The caller holds its lock."""
        return cls(private, uuid.uuid4().hex).adopt(incarnation)

    def adopt(self, incarnation: int) -> Fence:
        """The same for a directory beside that of rank 0, whose token it is."""
        owner = {
            "token": self.token,
            "incarnation": incarnation,
            "host": os.uname().nodename,
            "pid": os.getpid(),
        }
        storage.replace_small(self._path, json.dumps(owner).encode())
        return self

    def holds(self) -> bool:
        return self._token() == self.token

    def marked(self) -> bool:
        """Whether an incarnation has taken the directory."""
        return os.path.lexists(self._path)

    def _token(self) -> str | None:
        """None where it cannot be read."""
        try:
            owner = json.loads(storage.read_plain(self._path, _LARGEST))
        except (OSError, ValueError, RecursionError):
            return None
        token = owner.get("token") if isinstance(owner, dict) else None
        return token if isinstance(token, str) else None

    def check(self) -> None:
        """SaveError if a later incarnation has taken the directory over: this one may not commit any more."""
        if not self.holds():
            raise self._overtaken()

    def check_alone(self) -> None:
        """The same for a single process that has the lock as well: here an unreadable token is no reason to
        lose a save."""
        if self._token() not in (self.token, None):
            raise self._overtaken()

    def _overtaken(self) -> errors.SaveError:
        return errors.SaveError(
            "nothing is committed: a later incarnation of this run owns the directory, and this process "
            "belongs to an earlier one"
        )
