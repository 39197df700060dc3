"""The secrets of one incarnation of many ranks: what opens the launcher's store, and what opens the way for
parts of checkpoints.

torch's own store, in which the ranks meet, asks for no secret: any process that reaches MASTER_PORT can read
all of it. So no secret is ever put there. The ranks of one directory find the keys in a file that only their
user can read; a rank whose machine has another directory finds them in the mirror, which asks for credentials
of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from lastcall.storage import files as storage

NAME = "keys.json"
_LARGEST = 4096


@dataclass(frozen=True)
class Keys:
    token: str  # of the incarnation that they belong to; not a secret
    store: str  # opens the store of `lastcall run`; empty where there is none
    parts: str  # opens the ports at which the ranks receive parts

    @classmethod
    def made(cls, token: str, store: str = "") -> Keys:
        return cls(token, store, secrets.token_hex(16))

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def write(self, private: Path) -> None:
        storage.replace_small(private / NAME, self.to_bytes(), 0o600)


def parse(data: bytes | None, token: str) -> Keys | None:
    """None where these are not the keys of this incarnation."""
    try:
        keys = Keys(**json.loads(data or b""))
    except (ValueError, TypeError, RecursionError):
        return None
    whole = all(isinstance(value, str) for value in asdict(keys).values())
    return keys if whole and keys.token == token and keys.parts else None


def read(private: Path, token: str) -> Keys | None:
    """None where there are none yet, or where another user could have written or read them."""
    path = private / NAME
    try:
        info = os.stat(path, follow_symlinks=False)
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            return None
        return parse(storage.read_plain(path, _LARGEST), token)
    except OSError:
        return None
