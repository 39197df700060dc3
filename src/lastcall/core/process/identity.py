"""Which process is meant: a pid is used again, on another machine and after a restart."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lastcall.core.process import registry


@dataclass(frozen=True)
class Process:
    """Which process a rank is. `host` is the same only for processes that can look each other up in /proc."""

    host: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> Process:
        """Two containers on one machine have one boot id, but not the same process numbers."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
        except OSError:
            host = ""  # no process can be looked up
        return cls(host, os.getpid(), registry.process_start(os.getpid()) or 0)

    def gone(self, host: str) -> bool:
        """Whether it is known to have ended, as seen from `host`."""
        return bool(host) and self.host == host and registry.process_start(self.pid) != self.started
