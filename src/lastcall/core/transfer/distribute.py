"""A checkpoint that is in the directory of rank 0, for ranks that do not see it (`directories`). One rank of
each machine gets it: from the mirror or, where it is not uploaded yet, from rank 0 (`parts`)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lastcall import clock as clocks
from lastcall import errors
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.engine.writer import Engine
from lastcall.core.ranks.peers import Ranks
from lastcall.core.restore import restore
from lastcall.core.sync.stopped import Stopped
from lastcall.core.transfer.directories import Directories
from lastcall.core.transfer.parts import PartTransfer

log = logging.getLogger("lastcall")
_PATIENCE = 600.0  # seconds for the slowest machine
_LOOK = 0.5
StopRequested = Callable[[], bool]


class Distribution:
    """`from_mirror(fingerprint, stop_requested)`: False where the mirror does not have that checkpoint."""

    def __init__(
        self,
        catalog: Catalog,
        clock: clocks.Clock,
        engine: Engine,
        ranks: Ranks,
        directories: Directories,
        part_transfer: PartTransfer | None,
        from_mirror: Callable[[str, StopRequested], bool],
        run: str,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._engine = engine
        self._ranks = ranks
        self._directories = directories
        self._part_transfer = part_transfer
        self._from_mirror = from_mirror
        self._run = run

    def bring(self, wanted: str, stop_requested: StopRequested) -> None:
        """Have the checkpoint whose record has this fingerprint in this rank's directory, whole. Stopped if a
        notice comes first."""
        assert self._part_transfer is not None
        here = next((entry for entry in self._catalog.entries() if entry.record.fingerprint == wanted), None)
        if here is not None:
            try:
                restore.verify(here, self._engine)
                return
            except errors.UncheckedError:
                raise
            except errors.CheckpointError as error:
                log.warning("%s", self._catalog.set_aside(here.path, str(error)))
        try:
            if self._from_mirror(wanted, stop_requested):
                return
        except (errors.StorageError, errors.CheckpointError) as error:
            log.warning("Fetching the checkpoint from rank 0, because the mirror failed: %s", error)
        self._part_transfer.fetch(0, wanted, stop_requested)

    def gather(self, stop_requested: StopRequested, check: Callable[[int], None]) -> None:
        """At the start: fetch what another machine has and rank 0 has not. The survivors of a former
        incarnation may have committed there, and not have uploaded it in time. Every rank that opens a
        directory calls it. `check` raises where a rank's message will not come."""
        ranks, catalog = self._ranks, self._catalog
        here = next((entry.record for entry in catalog.entries() if entry.record.complete), None)
        if self._directories.elsewhere:
            newest = [] if here is None else [*here.recency, here.run, here.fingerprint]
            ranks.tell(f"newest/{ranks.rank}", {"newest": newest})
            return
        for leader in self._directories.leaders:
            until = self._clock.now() + _PATIENCE
            while (word := ranks.hear(f"newest/{leader}", _LOOK)) is None:
                check(leader)
                if stop_requested() or self._clock.now() >= until:
                    return
            match word.get("newest"):
                case [int(incarnation), int(sequence), int(step), str(run), str(wanted)]:
                    ours, known = (here.run, here.recency) if here is not None else (self._run, (-1, -1, -1))
                    if run == ours and (incarnation, sequence, step) > known:
                        self._take(leader, wanted, stop_requested)
                        here = next(
                            (entry.record for entry in catalog.entries() if entry.record.complete), None
                        )

    def _take(self, leader: int, wanted: str, stop_requested: StopRequested) -> None:
        assert self._part_transfer is not None
        try:
            self._part_transfer.fetch(leader, wanted, stop_requested)
        except (errors.LastcallError, Stopped) as error:
            log.warning(
                "Could not fetch the checkpoint that rank %d has on its machine: %s",
                leader,
                str(error) or "a notice came",
            )

    def share(self, name: str, occasion: str, stop_requested: StopRequested = lambda: False) -> None:
        """A checkpoint that all ranks are about to read, or to refer to: returns when it is in all
        directories. All ranks call it, once on each occasion. What fails is logged; a notice ends it."""
        ranks, directories = self._ranks, self._directories
        if not directories.spread:
            return
        until = self._clock.now() + _PATIENCE
        place = f"{occasion}/{name}"

        def word(key: str, rank: int) -> dict[str, object]:
            while self._clock.now() < until and rank not in ranks.gone() and not stop_requested():
                if (said := ranks.hear(key, _LOOK)) is not None:
                    return said
            return {}

        if not directories.elsewhere:
            if ranks.rank == 0:
                entry = next((entry for entry in self._catalog.entries() if entry.path.name == name), None)
                ranks.tell(
                    f"share/{place}", {"record": entry.record.fingerprint if entry is not None else ""}
                )
                for leader in directories.leaders:
                    word(f"shared/{place}/{leader}", leader)  # it may need this process until then
            return
        if directories.opens_it:
            wanted = str(word(f"share/{place}", 0).get("record") or "")
            try:
                if wanted:
                    self.bring(wanted, stop_requested)
            except (errors.LastcallError, OSError, Stopped) as error:
                log.warning(
                    "Could not copy %s to %s: %s", name, self._catalog.root, str(error) or "a notice came"
                )
            ranks.tell(f"shared/{place}/{ranks.rank}", {"done": True})
        else:
            word(f"shared/{place}/{directories.leader}", directories.leader)
