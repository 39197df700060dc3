"""From protect() to the first step: lock the directory, clean it up, and restore the newest valid checkpoint.

Alone, one process does it all. Together, rank 0 opens the directory and all ranks load the same checkpoint
(`joint.start`).
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lastcall import errors
from lastcall.core.checkpoint import retention
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.checkpoint.ownership import Fence
from lastcall.core.checkpoint.record import Entry
from lastcall.core.context import RunContext
from lastcall.core.engine.writer import Engine
from lastcall.core.joint import joint_start
from lastcall.core.joint.save import JointSave
from lastcall.core.mirror.mirror import Mirror
from lastcall.core.process import exits, throughput
from lastcall.core.ranks.peers import Ranks
from lastcall.core.restore import restore
from lastcall.core.save.saver import Saver
from lastcall.core.startup import recovery
from lastcall.core.startup.takeover import Takeover
from lastcall.core.subject import Boundary
from lastcall.core.sync.stopped import Stopped
from lastcall.core.transfer.distribute import Distribution
from lastcall.core.transfer.parts import PartTransfer
from lastcall.storage import files as storage
from lastcall.types import Kind, Notice, Outcome

log = logging.getLogger("lastcall")
_SMALL = 64 * 1024
_MANY = 10**9  # incarnations: more is no count


@dataclass(frozen=True)
class JointParts:
    """What an incarnation of many ranks has in addition."""

    ranks: Ranks
    save: JointSave
    distribution: Distribution


@dataclass(frozen=True)
class Started:
    """Everything that is known before the first step: a session is built from it."""

    run: str
    incarnation: int
    engine: Engine
    saver: Saver
    mirror: Mirror | None
    together: JointParts | None
    resumed: Entry | None  # the checkpoint that this incarnation continues from
    committed: Boundary | None  # the boundary that it holds exactly
    best: float | None  # of the monitored metric, so far

    @property
    def had_finished(self) -> bool:
        """The run was at its end when it was saved, on all ranks."""
        return self.resumed is not None and self.resumed.record.kind is Kind.FINAL

    def close(self, catalog: Catalog) -> None:
        """No session came of it. The other ranks must not take this one's silence for an exit in order."""
        if self.together is not None:
            self.together.ranks.fail("its session could not begin")
            self.together.save.close()
        self.engine.close()
        catalog.close()


class Startup:
    """`stop_requested`: whether a notice has come; it looks for those that come as files, since no thread
    does yet."""

    def __init__(self, context: RunContext, stop_requested: Callable[[], bool]) -> None:
        self._context = context
        self._stop_requested = stop_requested
        # Whether another rank has left because of a notice, and no rank waits for this one any more.
        self._left: Callable[[], bool] = lambda: False
        self._mirror = self._make_mirror()

    def run(self) -> Started:
        return self._together() if self._context.world.many else self._alone()

    def _make_mirror(self) -> Mirror | None:
        context, jit = self._context, self._context.jit
        if jit.mirror is None:
            return None
        catalog = context.catalog
        mirror = Mirror(
            jit.mirror, catalog, context.clock, context.events, lambda: catalog.keep, jit.mirror_keys
        )
        context.budget.afterwards = mirror.seconds
        return mirror

    # ---- one process ---------------------------------------------------------------------------------------

    def _alone(self) -> Started:
        context = self._context
        if not Takeover(context.catalog, context.clock, self._stop_requested).open():
            self._stopped_before_the_first_step()
        try:
            if not self._fetched():
                self._stopped_before_the_first_step()
            recovery.recover_into(context.catalog, "the process was killed", context.clock)
            try:
                run, incarnation = self._identity()
            except Stopped:
                self._stopped_before_the_first_step()
            engine, saver = self._equip(run, incarnation, None)
            saver.fence = self._fence(incarnation)
            try:
                entries = self._tidied()
                began = context.clock.now()
                entry = restore.newest(context.catalog, engine, context.subject) if entries else None
                best = self._resumed(saver, incarnation, entry, entries, context.clock.now() - began)
            except BaseException:
                engine.close()
                raise
        except BaseException:
            context.catalog.close()
            raise
        return self._started(run, incarnation, engine, saver, None, entry, best)

    def _fence(self, incarnation: int) -> Fence | None:
        """Keeps the remains of an earlier incarnation from committing, where the lock does not."""
        try:
            return Fence.take(self._context.catalog.private, incarnation)
        except OSError as error:  # a full disk must not keep a run from resuming
            log.warning("Could not mark the directory as taken: %s", error)
            return None

    # ---- many ranks ----------------------------------------------------------------------------------------

    def _together(self) -> Started:
        """Rank 0 opens the directory; all ranks load the same checkpoint, and none begins before all have
        it."""
        context = self._context
        context.catalog.make()
        start = joint_start.JointStart(
            context.world, context.catalog, context.clock, self._stop_requested, self._mirror
        )
        self._left = start.left
        try:
            joined = self._lead(start) if context.world.rank == 0 else self._follow(start)
            run, incarnation = joined.start.run, joined.start.incarnation
            engine, saver = self._equip(run, incarnation, context.world.rank)
            try:
                return self._begin_together(start, joined, engine, saver)
            except BaseException:
                engine.close()
                raise
        except Stopped:
            context.catalog.close()
            self._stopped_before_the_first_step()
        except BaseException as error:
            start.fail(error)
            context.catalog.close()
            raise

    def _lead(self, start: joint_start.JointStart) -> joint_start.Joined:
        context = self._context
        try:
            if (
                not Takeover(context.catalog, context.clock, self._stop_requested).open()
                or not self._fetched()
            ):
                raise Stopped
            return start.lead(*self._identity())
        except Stopped:
            start.leave()
            raise
        except (errors.LastcallError, OSError) as error:
            start.refuse(error)
            raise

    def _follow(self, start: joint_start.JointStart) -> joint_start.Joined:
        joined = start.follow()
        if joined.directories.elsewhere:
            self._open_apart(start, joined)
        return joined

    def _open_apart(self, start: joint_start.JointStart, joined: joint_start.Joined) -> None:
        """A directory that is not that of rank 0: one rank of its machine takes it, as rank 0 takes the
        other."""
        context = self._context
        if not joined.directories.opens_it:
            start.wait_until_opened()
            return
        if not Takeover(context.catalog, context.clock, self._stop_requested).open():
            start.leave()
            raise Stopped
        joined.fence.adopt(joined.start.incarnation)
        start.opened()

    def _begin_together(
        self, start: joint_start.JointStart, joined: joint_start.Joined, engine: Engine, saver: Saver
    ) -> Started:
        context, directories = self._context, joined.directories
        world, catalog, clock = context.world, context.catalog, context.clock
        ranks = Ranks(
            world, clock, joined.store, joined.start.token, joined.over, joined.peers, context.subject.part_of
        )
        part_transfer = (
            PartTransfer(catalog, joined.store, joined.keys.parts, world.rank, world.address)
            if directories.spread
            else None
        )
        save = JointSave(
            catalog, saver, joined.fence, ranks, clock, directories, part_transfer, context.jit.grace
        )
        distribution = Distribution(
            catalog, clock, engine, ranks, directories, part_transfer, self._from_mirror, joined.start.run
        )  # fmt: skip
        together = JointParts(ranks, save, distribution)
        try:
            entries = self._tidied() if directories.opens_it else []
            if directories.spread and directories.opens_it:
                distribution.gather(self._stop_requested, start.check)
                entries = catalog.entries()
            began = clock.now()
            entry = start.load(
                ranks.agreement,
                engine,
                context.subject,
                lambda wanted: distribution.bring(wanted, self._stop_requested),
            )
            start.all_here()
            incarnation = joined.start.incarnation
            best = self._resumed(saver, incarnation, entry, entries or catalog.entries(), clock.now() - began)
            context.subject.join(joined.start.run, incarnation, Path(context.jit.guard_folder))
        except BaseException:
            save.close()
            raise
        return self._started(joined.start.run, incarnation, engine, saver, together, entry, best)

    def _from_mirror(self, wanted: str, stop_requested: Callable[[], bool]) -> bool:
        return self._mirror is not None and self._mirror.bring_same(wanted, stop_requested)

    # ---- both ----------------------------------------------------------------------------------------------

    def _started(
        self,
        run: str,
        incarnation: int,
        engine: Engine,
        saver: Saver,
        together: JointParts | None,
        resumed: Entry | None,
        best: float | None,
    ) -> Started:
        context, committed = self._context, None
        if resumed is not None:
            record = resumed.record
            if record.whole and record.complete and record.world == context.world.size:
                committed = context.subject.boundary
        return Started(run, incarnation, engine, saver, self._mirror, together, resumed, committed, best)

    def _stopped_before_the_first_step(self) -> NoReturn:
        """No rank has taken a step: there is nothing to save."""
        context = self._context
        context.outcome.decide(Outcome.SAVED)
        notice = context.latch.notice or Notice(
            "ranks", "another rank was asked to stop", context.clock.now()
        )
        log.info("%s came before the first step: there is nothing to save", notice.reason)
        raise errors.Preempted(
            exits.code(notice, True, context.jit.exit_code), "asked to stop before the first step"
        )

    def _equip(self, run: str, incarnation: int, rank: int | None) -> tuple[Engine, Saver]:
        context, catalog = self._context, self._context.catalog
        if context.run:
            catalog.run = run
        engine = Engine(context.jit.threads, catalog.files, context.allocate)
        saver = Saver(
            catalog, engine, context.budget, context.clock, run=run, incarnation=incarnation, rank=rank
        )
        return engine, saver

    def _tidied(self) -> list[Entry]:
        catalog = self._context.catalog
        for sentence in catalog.clean():
            log.warning("On start: %s", sentence)
        for entry in catalog.foreign():
            log.info("Ignoring %s: it belongs to another run (%s)", entry.path.name, entry.record.run[:8])
        return catalog.entries()

    def _resumed(
        self, saver: Saver, incarnation: int, entry: Entry | None, entries: list[Entry], seconds: float
    ) -> float | None:
        """Learn from the checkpoints that are there, and log where the run continues. Returns the monitored
        metric's best value."""
        context, mirror = self._context, self._mirror
        for earlier in reversed(entries):
            if earlier.record.complete:
                context.budget.observe(earlier.record.written // earlier.record.world, earlier.record.seconds)
        saver.follow(entries, entry)
        if (
            entry is not None
            and mirror is not None
            and context.world.rank == 0
            and not mirror.has(entry.record)
        ):
            mirror.push(entry, rotate=False)  # what the adapter wants to keep is not known yet
        self._name_passed_over(entry, entries)
        if entry is not None:
            record = entry.record
            exact = "exact" if record.exact else f"not exact: {record.because}"
            read = throughput.amount(record.size)
            others = f", {len(entries) - 1} other(s)" if len(entries) > 1 else ""
            log.info(
                "Resuming from %s (step %d, %s, reason %s, %s; digests hold; %s in %.2fs): the newest valid "
                "checkpoint%s",
                entry.path.name,
                record.step,
                record.kind.value,
                record.reason or "none",
                exact,
                read,
                seconds,
                others,
            )
        context.events.emit(
            "start", incarnation=incarnation, resumed=entry.path.name if entry else None, seconds=seconds,
            periodic=context.background_saves,
        )  # fmt: skip
        keep = context.catalog.keep
        best = retention.best(entries, keep)
        return None if best is None or keep.monitor is None else best.record.metrics[keep.monitor]

    def _name_passed_over(self, entry: Entry | None, entries: list[Entry]) -> None:
        """Logs what looks like saved work and is not resumed from."""
        context, root = self._context, self._context.catalog.root
        others_too = context.subject.loads_by_itself  # it continues from checkpoints without a record, too
        found = [
            each
            for each in context.catalog.passed_over()
            if not (others_too and "has no commit record" in each[1])
        ]
        if entry is not None:
            for step, words in found:
                if step > entry.record.step and "damaged" not in words and context.world.rank == 0:
                    log.warning("%s. It is newer than %s, but is not resumed from", words, entry.path.name)
            return
        names = [each for _, each in found] + [
            f"{each.path.name} is damaged" for each in entries if each.path.is_dir()
        ]
        if names and context.world.rank == 0:
            log.error(
                "Starting from the beginning, although %s holds saved work: none of it can be resumed from "
                "(%s). If that is a "
                "mistake, stop this run, put the checkpoint back and start it again. See what is wrong with "
                "each: lastcall verify %s",
                root,
                "; ".join(names),
                root,
            )
        elif not others_too:  # otherwise its adapter decides, and logs it
            log.info("Starting from the beginning: %s holds no checkpoint", root)

    def _fetched(self) -> bool:
        """Download from the mirror what this directory lacks. False if a notice came meanwhile."""
        self._context.catalog.run = self._context.run
        return self._mirror is None or self._mirror.take_over(self._stop_requested, self._left)

    def _identity(self) -> tuple[str, int]:
        """The run's id and the number of this incarnation, kept beside the checkpoints."""
        context, catalog = self._context, self._context.catalog
        path = catalog.private / "run.json"
        try:
            known = json.loads(storage.read_plain(path, _SMALL))
            run, former = str(known["run"]), int(known["incarnations"])
            if not (run.isprintable() and run.isascii() and 0 <= former < _MANY):
                raise ValueError("not a run of ours")
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            run, former = uuid.uuid4().hex, 0
        run = context.run or run
        # Commits of this incarnation are newer than all existing ones, also where run.json was lost.
        incarnation = 1 + max([former, *(entry.record.incarnation for entry in catalog.entries())])
        try:
            storage.replace_small(path, json.dumps({"run": run, "incarnations": incarnation}).encode())
        except OSError as error:  # a full disk must not keep a run from resuming
            log.warning("Could not write %s: %s", path, error)
        if self._mirror is not None:
            self._mirror.note(run, incarnation, self._stop_requested, self._left)
        return run, incarnation
