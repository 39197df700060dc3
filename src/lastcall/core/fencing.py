"""Which incarnation owns a directory. The lock keeps a second run out for as long as the leader's process lives; the token also keeps
out what is left of an incarnation whose leader is gone: orphans, a frozen rank that wakes up, a host that was cut off."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from lastcall import errors

NAME = "owner.json"


class Fence:
    def __init__(self, private: Path, token: str) -> None:
        self._path = private / NAME
        self.token = token

    @classmethod
    def take(cls, private: Path, incarnation: int) -> Fence:
        """The directory is this incarnation's from now on. The caller holds its lock."""
        fence = cls(private, uuid.uuid4().hex)
        under = fence._path.with_suffix(".tmp")
        under.write_text(
            json.dumps({"token": fence.token, "incarnation": incarnation, "host": os.uname().nodename, "pid": os.getpid()})
        )
        os.replace(under, fence._path)
        return fence

    def holds(self) -> bool:
        try:
            owner = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(owner, dict) and owner.get("token") == self.token

    def check(self) -> None:
        """SaveError if a later incarnation has taken the directory over: what this one would commit is not wanted any more."""
        if not self.holds():
            raise errors.SaveError(
                "nothing is committed: a later incarnation of this run owns the directory, and this process is left over from an "
                "earlier one"
            )
