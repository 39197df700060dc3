"""A checkpoint that is in the directory of rank 0, for ranks that do not see that (`homes`). One rank of each machine gets it: from the
mirror or, where it is not copied yet, from rank 0 (`parcels`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from lastcall import errors
from lastcall.core.restore import restore
from lastcall.core.sync.stopped import Stopped

if TYPE_CHECKING:
    from lastcall.core.session import Session

log = logging.getLogger("lastcall")
_PATIENCE = 600.0  # seconds for the slowest machine
_LOOK = 0.5


def bring(session: Session, wanted: str, told: Callable[[], bool]) -> None:
    """Have the checkpoint whose record has this fingerprint in this rank's directory, whole. Stopped if a notice comes meanwhile."""
    catalog = session.catalog
    assert session.mirror is not None and session.gathering is not None and session.gathering.parcels is not None
    here = next((entry for entry in catalog.entries() if entry.record.fingerprint == wanted), None)
    if here is not None:
        try:
            restore.verify(here, session.engine)
            return
        except errors.UncheckedError:
            raise
        except errors.CheckpointError as error:
            log.warning("%s", catalog.set_aside(here.path, str(error)))
    try:
        if session.mirror.bring_same(wanted, told):
            return
    except (errors.StorageError, errors.CheckpointError) as error:
        log.warning("The checkpoint is brought from rank 0, and not from %s: %s", session.mirror.url, error)
    session.gathering.parcels.bring(0, wanted, told)


def gather(session: Session, told: Callable[[], bool], check: Callable[[int], None]) -> None:
    """At the start: what another machine has and rank 0 has not. The survivors of a former incarnation may have committed there, and
    not have copied it in time. Every rank that leads a directory calls it. `check` raises where a rank's word will not come."""
    ranks, gathering, catalog = session.ranks, session.gathering, session.catalog
    assert ranks is not None and gathering is not None and gathering.parcels is not None
    here = next((entry.record for entry in catalog.entries() if entry.record.complete), None)
    if gathering.homes.apart:
        newest = [] if here is None else [*here.recency, here.run, here.fingerprint]
        ranks.tell(f"newest/{ranks.rank}", {"newest": newest})
        return
    for leader in gathering.homes.leaders:
        until = session.clock.now() + _PATIENCE
        while (word := ranks.hear(f"newest/{leader}", _LOOK)) is None:
            check(leader)
            if told() or session.clock.now() >= until:
                return
        match word.get("newest"):
            case [int(incarnation), int(sequence), int(step), str(run), str(wanted)]:
                ours, known = (here.run, here.recency) if here is not None else (session.saver.run, (-1, -1, -1))
                if run == ours and (incarnation, sequence, step) > known:
                    _take(session, leader, wanted, told)
                    here = next((entry.record for entry in catalog.entries() if entry.record.complete), None)


def _take(session: Session, leader: int, wanted: str, told: Callable[[], bool]) -> None:
    assert session.gathering is not None and session.gathering.parcels is not None
    try:
        session.gathering.parcels.bring(leader, wanted, told)
    except (errors.LastcallError, Stopped) as error:
        log.warning("What rank %d has saved on its machine could not be taken from there: %s", leader, str(error) or "a notice came")


def share(session: Session, name: str, occasion: str, told: Callable[[], bool] = lambda: False) -> None:
    """A checkpoint that all ranks are about to read, or to refer to: returns when it is in all directories. All ranks call it, once on
    each occasion. What fails is said; a notice ends it."""
    ranks, gathering = session.ranks, session.gathering
    if ranks is None or gathering is None or not gathering.homes.spread:
        return
    homes, until = gathering.homes, session.clock.now() + _PATIENCE
    place = f"{occasion}/{name}"

    def word(key: str, rank: int) -> dict[str, object]:
        while session.clock.now() < until and rank not in ranks.gone() and not told():
            if (said := ranks.hear(key, _LOOK)) is not None:
                return said
        return {}

    if not homes.apart:
        if ranks.rank == 0:
            entry = next((entry for entry in session.catalog.entries() if entry.path.name == name), None)
            ranks.tell(f"share/{place}", {"record": entry.record.fingerprint if entry is not None else ""})
            for leader in homes.leaders:
                word(f"shared/{place}/{leader}", leader)  # it may need this process until then
        return
    if homes.leads:
        wanted = str(word(f"share/{place}", 0).get("record") or "")
        try:
            if wanted:
                bring(session, wanted, told)
        except (errors.LastcallError, OSError, Stopped) as error:
            log.warning("%s could not be brought to %s: %s", name, session.catalog.root, str(error) or "a notice came")
        ranks.tell(f"shared/{place}/{ranks.rank}", {"done": True})
    else:
        word(f"shared/{place}/{homes.leader}", homes.leader)
