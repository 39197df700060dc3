"""From protect() to the first step: the directory is ours, it is tidy, and the state is that of the newest valid checkpoint.

Alone, one process does it all. Together, rank 0 opens the directory and all ranks load the same checkpoint (`joining`).
"""

from __future__ import annotations

import functools
import json
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lastcall import errors
from lastcall.core.checkpoint import catalog as catalogs
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.engine.writer import Engine
from lastcall.core.joint import joint_start
from lastcall.core.joint.joint import Joint
from lastcall.core.joint.peers import Ranks
from lastcall.core.joint.save import Gathering
from lastcall.core.process import exits, throughput
from lastcall.core.restore import restore
from lastcall.core.save.saver import Saver
from lastcall.core.startup import recovery
from lastcall.core.startup.takeover import Succession
from lastcall.core.sync.stopped import Stopped
from lastcall.core.transfer import distribute
from lastcall.core.transfer.parts import Parcels
from lastcall.storage import files as storage
from lastcall.types import Kind, Notice, Outcome

if TYPE_CHECKING:
    from lastcall.core.session import Session

log = logging.getLogger("lastcall")
_SMALL = 64 * 1024
_MANY = 10**9  # incarnations: more is no count


class Starting:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._left: Callable[[], bool] = lambda: False  # whether another rank was told to stop, and nobody waits for this one any more

    def alone(self) -> catalogs.Entry | None:
        session = self._session
        if not Succession(session.catalog, session.clock, self._told).open():
            self._stopped_before_the_first_step()
        try:
            if not self._fetched():
                self._stopped_before_the_first_step()
            recovery.recover_into(session.catalog, "the process was killed", session.clock)
            try:
                run, session.incarnation = self._identity()
            except Stopped:
                self._stopped_before_the_first_step()
            self._equip(run, None)
            session.saver.fence = self._fence()
            try:
                entries = self._tidied()
                began = session.clock.now()
                entry = restore.newest(session.catalog, session.engine, session.subject) if entries else None
                self._resumed(entry, entries, session.clock.now() - began)
            except BaseException:
                session.engine.close()
                raise
        except BaseException:
            session.catalog.close()
            raise
        return entry

    def together(self) -> catalogs.Entry | None:
        """Rank 0 opens the directory; all ranks load the same checkpoint, and nobody begins before all have it."""
        session = self._session
        leading = session.world.rank == 0
        session.catalog.make()
        meeting = joint_start.Joining(session.world, session.catalog, session.clock, self._told, session.mirror)
        self._left = meeting.left
        try:
            if leading:
                joined = self._lead(meeting)
            else:
                joined = meeting.follow()
                session.incarnation = joined.start.incarnation
                if joined.homes.apart:
                    self._open_apart(meeting, joined)
            self._equip(joined.start.run, session.world.rank)
            try:
                return self._begin_together(meeting, joined)
            except BaseException:
                if session.gathering is not None:
                    session.gathering.close()
                session.engine.close()
                raise
        except Stopped:
            session.catalog.close()
            return self._stopped_before_the_first_step()
        except BaseException as error:
            meeting.fail(error)
            session.catalog.close()
            raise

    def _told(self) -> bool:
        """Nobody else looks for news that come as a file before the agent is there."""
        self._session.hear()
        return self._session.latch.raised

    def _lead(self, meeting: joint_start.Joining) -> joint_start.Joined:
        session = self._session
        try:
            if not Succession(session.catalog, session.clock, self._told).open() or not self._fetched():
                raise Stopped
            run, session.incarnation = self._identity()
            return meeting.lead(run, session.incarnation)
        except Stopped:
            meeting.leave()
            raise
        except (errors.LastcallError, OSError) as error:
            meeting.refuse(error)
            raise

    def _open_apart(self, meeting: joint_start.Joining, joined: joint_start.Joined) -> None:
        """A directory that is not that of rank 0: one rank of its machine takes it, as rank 0 takes the other."""
        session = self._session
        if not joined.homes.leads:
            meeting.wait_until_opened()
            return
        if not Succession(session.catalog, session.clock, self._told).open():
            meeting.leave()
            raise Stopped
        joined.fence.adopt(session.incarnation)
        meeting.opened()

    def _begin_together(self, meeting: joint_start.Joining, joined: joint_start.Joined) -> catalogs.Entry | None:
        session = self._session
        ranks = session.ranks = Ranks(session.world, session.clock, joined)
        session.gathering = Gathering(session.catalog, session.saver, joined.fence, ranks, session.clock, joined.homes)
        if joined.homes.spread:
            world = session.world
            session.gathering.parcels = Parcels(session.catalog, joined.store, joined.keys.parts, world.rank, world.address)
        entries = self._tidied() if joined.homes.leads else []
        if joined.homes.spread and joined.homes.leads:
            distribute.gather(session, self._told, meeting.check)
            entries = session.catalog.entries()
        began = session.clock.now()
        bring = functools.partial(distribute.bring, session, told=self._told)
        entry = meeting.load(ranks.agreement, session.engine, session.subject, bring)
        meeting.all_here()
        self._resumed(entry, entries or session.catalog.entries(), session.clock.now() - began)
        ranks.part = session.subject.part_of
        session.subject.join(joined.start.run, session.incarnation, Path(session.jit.guard_folder))
        session.serving = session.joint = Joint(session, ranks)
        ranks.begin(session.jit.hang_seconds, self._how_far, session.notify, session.jit.grace)
        return entry

    def _how_far(self) -> tuple[int, str]:
        session = self._session
        if session.joint is not None and session.joint.finished:
            return session.subject.ordinal, "finished"
        return session.subject.ordinal, "serving a notice" if session.serving.begun else ""

    def _stopped_before_the_first_step(self) -> NoReturn:
        """Nobody has taken a step: there is nothing to save."""
        session = self._session
        session.outcome = Outcome.SAVED
        notice = session.latch.notice or Notice("ranks", "another rank was told to stop", session.clock.now())
        log.info("%s came before the first step: nothing has been done, and nothing is lost", notice.reason)
        raise errors.Preempted(exits.code(notice, True, session.jit.exit_code), "told to stop before the first step")

    def _fence(self) -> Fence | None:
        """So that what is left of an earlier incarnation, which no lock keeps out everywhere, commits nothing any more."""
        try:
            return Fence.take(self._session.catalog.private, self._session.incarnation)
        except OSError as error:  # a full disk must not keep a run from resuming
            log.warning("The directory could not be marked as taken: %s", error)
            return None

    def _equip(self, run: str, rank: int | None) -> None:
        session = self._session
        if session.run:
            session.catalog.run = run
        session.engine = Engine(session.jit.threads, session.catalog.files, session.allocate)
        session.saver = Saver(
            session.catalog, session.engine, session.budget, session.clock, run=run, incarnation=session.incarnation, rank=rank
        )

    def _tidied(self) -> list[catalogs.Entry]:
        session = self._session
        for sentence in session.catalog.clean():
            log.warning("On start: %s", sentence)
        for entry in session.catalog.foreign():
            log.info("%s belongs to another run (%s): it is left alone", entry.path.name, entry.record.run[:8])
        return session.catalog.entries()

    def _resumed(self, entry: catalogs.Entry | None, entries: list[catalogs.Entry], seconds: float) -> None:
        """Learn from the checkpoints that are there, and say where the run goes on."""
        session = self._session
        for earlier in reversed(entries):
            if earlier.record.complete:
                session.budget.observe(earlier.record.written // earlier.record.world, earlier.record.seconds)
        best = catalogs.best(entries, session.keep)
        if best is not None and session.keep.monitor is not None:
            session.background.best = best.record.metrics[session.keep.monitor]
        session.saver.follow(entries, entry)
        if entry is not None and session.mirror is not None and session.world.rank == 0 and not session.mirror.has(entry.record):
            session.mirror.push(entry, rotate=False)  # what an adapter wants to be kept is not known yet
        self._name_passed_over(entry, entries)
        if entry is not None:
            record = entry.record
            exact = "exact" if record.exact else f"not exact: {record.because}"
            read = throughput.amount(record.size)
            others = f", {len(entries) - 1} other(s)" if len(entries) > 1 else ""
            log.info(
                "Resuming from %s (step %d, %s, reason %s, %s; digests hold; %s in %.2fs): the newest valid checkpoint%s",
                entry.path.name, record.step, record.kind.value, record.reason or "none", exact, read, seconds, others,
            )  # fmt: skip
            session.had_finished = record.kind is Kind.FINAL
            if record.whole and record.complete and record.world == session.world.size:
                session.committed = session.subject.boundary
        session.events.emit(
            "start", incarnation=session.incarnation, resumed=entry.path.name if entry else None, seconds=seconds,
            periodic=session.background.wanted,
        )  # fmt: skip

    def _name_passed_over(self, entry: catalogs.Entry | None, entries: list[catalogs.Entry]) -> None:
        """What looks like saved work, and is not gone on from: never without a word."""
        session, root = self._session, self._session.catalog.root
        others_too = getattr(session.subject, "loads_by_itself", False)  # it goes on from checkpoints without a record, too
        found = [each for each in session.catalog.passed_over() if not (others_too and "has no commit record" in each[1])]
        if entry is not None:
            for step, words in found:
                if step > entry.record.step and "damaged" not in words and session.world.rank == 0:
                    log.warning("%s. It is newer than %s, and is not resumed from", words, entry.path.name)
            return
        names = [each for _, each in found] + [f"{each.path.name} is damaged" for each in entries if each.path.is_dir()]
        if names and session.world.rank == 0:
            log.error(
                "Starting from the beginning, although work was saved in %s: none of it can be resumed from (%s). If that is a "
                "mistake, stop this run, put the checkpoint back and start it again. What is wrong with each: lastcall verify %s",
                root, "; ".join(names), root,
            )  # fmt: skip
        elif not others_too:  # otherwise its adapter decides, and says so
            log.info("Starting from the beginning: %s holds no checkpoint", root)

    def _fetched(self) -> bool:
        """From the mirror, what this directory lacks. False if a notice came meanwhile."""
        session = self._session
        session.catalog.run = session.run
        return session.mirror is None or session.mirror.take_over(self._told, self._left)

    def _identity(self) -> tuple[str, int]:
        """The run's name for itself and the number of this incarnation, kept beside the checkpoints."""
        session = self._session
        path = session.catalog.private / "run.json"
        try:
            known = json.loads(storage.read_plain(path, _SMALL))
            run, former = str(known["run"]), int(known["incarnations"])
            if not (run.isprintable() and run.isascii() and 0 <= former < _MANY):
                raise ValueError("not a run of ours")
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            run, former = uuid.uuid4().hex, 0
        run = session.run or run
        # What this one commits is newer than all that is there, also where run.json was lost.
        incarnation = 1 + max([former, *(entry.record.incarnation for entry in session.catalog.entries())])
        try:
            storage.replace_small(path, json.dumps({"run": run, "incarnations": incarnation}).encode())
        except OSError as error:  # a full disk must not keep a run from resuming
            log.warning("%s could not be written: %s", path, error)
        if session.mirror is not None:
            session.mirror.note(run, incarnation, self._told, self._left)
        return run, incarnation
