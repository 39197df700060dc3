"""Which ranks of a run share a directory. As a rule all do. With a mirror each machine may have one of its own, an emptyDir or the disk
of a spot instance: then the directory of the rank that commits is the run's, and the others send it their parts (`parcels`)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.catalog import Catalog
from lastcall.core.meeting import Meeting
from lastcall.core.world import World

log = logging.getLogger("lastcall")
FIRST = "first"  # the directory of rank 0
_GLIMPSE = 1.0  # seconds in which a file of rank 0 is seen that nobody has looked for before


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


def find(meeting: Meeting, world: World, catalog: Catalog, place: Path, machine: str, mirror: bool, clock: clocks.Clock) -> Homes:
    """Whose directory is whose; the last to say it tells all of them. `place`: a folder that rank 0 has made in its own."""
    rank, size, store = world.rank, world.size, meeting.store
    name = FIRST if _seen(place, clock) else name_of(catalog.private, machine)
    if name != FIRST and not mirror:
        raise errors.RanksError(
            f"rank {rank} has a directory of its own, {catalog.root}, and no mirror. Set LASTCALL_MIRROR for all ranks alike."
        )
    store.set(f"home/{rank}", name.encode())
    if store.add("homes", 1) == size:
        names = [(data or b"").decode() for data in store.get_many([f"home/{other}" for other in range(size)])]
        store.claim("all homes", json.dumps(names if len(set(names)) > 1 else []).encode())
    found = Homes(rank, json.loads(meeting.wait("all homes", "all ranks to open their directories")))
    if found.apart and found.leads:
        log.info("%s is not the directory of rank 0: parts of checkpoints are sent there", catalog.root)
    return found


def _seen(place: Path, clock: clocks.Clock) -> bool:
    until = clock.now() + _GLIMPSE
    while not place.is_dir():
        if clock.now() >= until:
            return False
        clock.sleep(_GLIMPSE / 5)
    return True
