"""Which ranks of a run share a directory. As a rule all do. With a mirror each machine may have one of its own, an emptyDir or the disk
of a spot instance: then the directory of the rank that commits is the run's, and the others send it their parts (`parcels`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIRST = "first"  # the directory of rank 0


@dataclass(frozen=True)
class Homes:
    rank: int
    names: Sequence[str] = ()  # of each rank's directory; empty where all have the same

    @property
    def spread(self) -> bool:
        """Whether there is more than one."""
        return len(set(self.names)) > 1

    @property
    def name(self) -> str:
        return self.names[self.rank] if self.names else FIRST

    @property
    def leader(self) -> int:
        """The rank that opens this rank's directory and keeps it tidy."""
        return self.names.index(self.name) if self.names else 0

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    @property
    def leaders(self) -> list[int]:
        """Those of the directories beside that of rank 0."""
        return sorted({self.names.index(name) for name in self.names} - {0})

    @property
    def apart(self) -> bool:
        """Whether this rank's directory is not that of rank 0."""
        return self.name != FIRST

    def shares_with(self, rank: int) -> bool:
        return not self.names or self.names[rank] == self.name


def name_of(folder: Path, machine: str) -> str:
    """A name for a directory that rank 0 does not see: the same for all processes of a machine that have it."""
    found = os.stat(folder)
    return f"{machine}/{found.st_dev}/{found.st_ino}"
