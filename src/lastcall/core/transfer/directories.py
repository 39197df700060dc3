"""Which ranks of a run share a directory. As a rule all do. With a mirror each machine may have one of its
own, an emptyDir or the disk of a spot instance: then the directory of the rank that commits is the run's, and
the others send it their parts (`parts`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.ranks.rendezvous import Rendezvous
from lastcall.core.ranks.world import World

log = logging.getLogger("lastcall")
FIRST = "first"  # the directory of rank 0; the others are named after the lowest rank that has them
_GLIMPSE = 1.0  # seconds in which a new file of rank 0 becomes visible


@dataclass(frozen=True)
class Directories:
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
    def opens_it(self) -> bool:
        return self.rank == self.leader

    @property
    def leaders(self) -> list[int]:
        """Those of the directories beside that of rank 0."""
        return sorted({self.names.index(name) for name in self.names} - {0})

    @property
    def elsewhere(self) -> bool:
        """Whether this rank's directory is not that of rank 0."""
        return self.name != FIRST

    def shares_with(self, rank: int) -> bool:
        return not self.names or self.names[rank] == self.name


def mark(place: Path, rank: int) -> Path:
    """A file that a rank creates in its directory, visible to the ranks that share it. `place`: a folder of
    this incarnation only, so no rank has looked for the name before, and no file system can have cached that
    it does not exist."""
    return place / f"home-{rank}"


def find(
    meeting: Rendezvous, world: World, catalog: Catalog, place: Path, mirror: bool, clock: clocks.Clock
) -> Directories:
    """Which ranks share a directory. Rank 0 has made its mark before. A rank that does not see it makes one,
    and ranks that see the same lowest mark share a directory: by what they see and not by its path, which may
    be the same on several machines."""
    rank = world.rank
    first = _seen(mark(place, 0), clock)
    if not first and not mirror:
        raise errors.RanksError(
            f"rank {rank} does not share the directory of rank 0 ({catalog.root}) and has no mirror. Set "
            "LASTCALL_MIRROR for all ranks."
        )
    if not first:
        mark(place, rank).mkdir(parents=True, exist_ok=True)
    marked = [name != FIRST for name in _told(meeting, world, "marked", "" if not first else FIRST)]
    if not any(marked):
        return Directories(rank)
    lowest = next(
        other for other in range(rank + 1) if (other == 0 or marked[other]) and mark(place, other).is_dir()
    )
    names = _told(meeting, world, "home", str(lowest) if lowest else FIRST)
    found = Directories(rank, names if len(set(names)) > 1 else ())
    if found.elsewhere and found.opens_it:
        log.info("%s is local to this machine; this rank's shards will be sent to rank 0", catalog.root)
    return found


def _told(meeting: Rendezvous, world: World, what: str, mine: str) -> list[str]:
    """Collects one text of each rank; the last rank to add its own publishes the list."""
    store = meeting.store
    store.set(f"{what}/{world.rank}", mine.encode())
    if store.add(f"{what}s", 1) == world.size:
        words = store.get_many([f"{what}/{other}" for other in range(world.size)])
        store.claim(f"all {what}s", json.dumps([(word or b"").decode() for word in words]).encode())
    found: list[str] = json.loads(meeting.wait(f"all {what}s", "all ranks to open their directories"))
    return found


def _seen(mark: Path, clock: clocks.Clock) -> bool:
    until = clock.now() + _GLIMPSE
    while not mark.is_dir():
        if clock.now() >= until:
            return False
        clock.sleep(_GLIMPSE / 5)
    return True
