"""protect() and Run: what a training script sees.

    with lastcall.protect("runs/exp1", model=model, optimizer=opt) as run:
        for step in run.steps(10_000):
            ...

A run has one loop. `steps` ends every pass in a boundary; `epochs`/`batches` end those passes in one in which
an optimizer stepped; `tick` says so by hand.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch

from lastcall import errors, settings
from lastcall.adapters.torch import hooks
from lastcall.adapters.torch.carry import places
from lastcall.adapters.torch.carry.carrier import Carrier
from lastcall.adapters.torch.carry.kept import Kept
from lastcall.adapters.torch.data import items
from lastcall.adapters.torch.driver import Driver
from lastcall.adapters.torch.loop import arguments, collecting, ended, endings, epoch_top, repeats
from lastcall.adapters.torch.loop.batches import Batches, Numbers
from lastcall.adapters.torch.loop.counting import Counting, Itself
from lastcall.adapters.torch.loop.forecast import Forecast
from lastcall.adapters.torch.loop.prelude import Prelude
from lastcall.adapters.torch.overlooked import Overlooked
from lastcall.adapters.torch.subject import TorchSubject
from lastcall.core.checkpoint.record import Entry
from lastcall.core.process import refusal
from lastcall.core.proof import witness
from lastcall.core.sync.gate import Gate
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage.files import Files
from lastcall.types import Kind, Outcome

log = logging.getLogger("lastcall")
T = TypeVar("T")
_TICKS = 16  # the first ones, whose place in the script is looked at


def protect(
    directory: str | os.PathLike[str],
    *,
    config: JITCheckpointConfig | None = None,
    periodic: PeriodicCheckpointConfig | None = None,
    guard: bool | None = None,
    files: Files | None = None,
    accelerator: Any = None,
    **state: Any,
) -> Run:
    """Protect a training run: save `state` into `directory` when the run is asked to stop, and resume from
    there next time.

    `state` is anything with state_dict/load_state_dict, tensors, numpy arrays, DataLoaders and JSON-like
    values. What cannot be saved is refused here (StateError names it). `guard`: keep a copy in shared memory,
    so that also a killed process loses little (the same as in `config`). `files` is for tests: a file system
    that fails on demand (lastcall.testing). `accelerator`: an accelerate.Accelerator. What it has prepared is
    saved and loaded by its own save_state() and load_state(), and left out of `state`.
    """
    arguments.refuse_settings(config, periodic, state)
    jit = config if config is not None else JITCheckpointConfig()
    if guard is not None:
        jit = settings.changed(jit, guard=guard)
    jit, directory = witness.adjusted(jit), witness.redirected(Path(directory).expanduser())
    periodic = periodic if periodic is not None else PeriodicCheckpointConfig()
    with refusal.explained():
        if accelerator is not None and jit.enabled:
            # code with an accelerator has accelerate
            from lastcall.adapters.accelerate.run import AcceleratorRun

            return AcceleratorRun(accelerator, directory, jit, periodic, state, files)
        subject = TorchSubject(arguments.with_inner(state), check=jit.enabled)
        subject.state.patient = True
        run = Run(directory, jit, periodic, subject, files)
        if jit.enabled:
            subject.overlooked = Overlooked(lambda: subject.state.values, subject.doubts)
            subject.overlooked.uncounted = run._outside
        return run


class Run:
    """A protected run; made by protect(), used in a `with` block."""

    def __init__(
        self,
        directory: Path,
        jit: JITCheckpointConfig,
        periodic: PeriodicCheckpointConfig,
        subject: TorchSubject,
        files: Files | None = None,
    ) -> None:
        self.directory = directory
        self._jit = jit
        self._subject = subject
        self._gate = Gate()
        self._driver: Driver | None = None
        self._carrier: Carrier | None = None
        self._kept = Kept()  # of a run that is switched off
        subject.lenient = jit.unmatched == "allow"
        if jit.enabled:
            self._driver = Driver(directory, subject, jit, periodic, subject.state.tensors(), files=files)
            self._gate = self._driver.gate
            self._carrier = subject.carry()
        self._resumed: int | None = None
        self._loops_to_skip = 0
        self._skipped = False
        self._counting = Counting(subject.doubts, subject.lags)
        self._continues = False  # the next batches() loop is the one that was interrupted
        self.left_early = False  # the last incarnation left its loop by `break`, as an early stop does
        self._sites: set[tuple[object, ...]] = set()  # the batches() loops of this pass of it
        self._ticked: set[int] = set()  # the lines that call tick()
        self._again = False  # this process has finished a run in this directory before
        self._stepping = False  # inside run.steps(): batches are the user's own business

    # ---- what a user asks ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of completed steps."""
        prelude, carrier = self._prelude, self._carrier
        waits = (
            prelude is not None
            and carrier is not None
            and prelude.waiting
            and carrier.asked(sys._getframe(1))
        )
        if waits and prelude is not None and self._resumed is not None:
            prelude.loop_begins(final=False)
            # the script has drawn between the block's begin and here, as it did the first time
            self._subject.put_randomness_back()
        return self._subject.step

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._subject.epoch

    @property
    def batch(self) -> int:
        """The index of the current batch of run.batches(): what enumerate() would have said had the epoch
        never been interrupted."""
        return max(self._subject.batches - 1, 0)

    @property
    def resumed(self) -> int | None:
        """The step that this incarnation resumed from, or None for a fresh start."""
        return self._resumed

    @property
    def id(self) -> str | None:
        """The run's own name: the same in every incarnation, and on every rank. For `wandb.init(id=run.id,
        resume="allow")` and the like. None when lastcall is off."""
        self._check_entered()
        return None if self._driver is None else self._driver.session.run

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop: the time for a long evaluation or an upload is better kept for
        the save."""
        return self._driver is not None and self._driver.stopping

    @property
    def state(self) -> dict[str, object]:
        """The values handed to protect(), by name. Values that cannot be changed in place (numbers, text,
        tuples) are brought back here, and saved from here: `run.state["best"] = 0.93`."""
        return self._subject.state.values

    def carry(self, **initial: Any) -> Kept:
        """Values that the loop carries: saved with every checkpoint, and there again in the next incarnation.
        `initial` are their values in a fresh run: `state = run.carry(best=math.inf)`, then `state.best =
        ...`."""
        self._check_entered()
        kept = self._carrier.kept if self._carrier is not None else self._kept
        kept._begin(initial)
        return kept

    def report(self, **metrics: Any) -> None:
        """Progress: anything that can become a number. Tensors are not waited for. Metrics are kept with the
        next checkpoints."""
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                metrics[name] = value.detach()  # the graph behind a loss would be kept alive
        self._subject.metrics = metrics
        if self._driver is not None:
            self._driver.context.progress.update(
                self._subject.step, self._subject.epoch - self._first_epoch, metrics
            )

    def save(self) -> Path | None:
        """Save now. Between two steps, and at the end of an epoch, the checkpoint is exact. Inside a step, or
        between the last batch and the end of an epoch, it is saved at once as it is, marked as not exact, and
        an exact one follows at the end of the step or epoch. Returns the checkpoint's folder; None when
        lastcall is off."""
        if self._driver is None:
            log.warning("run.save() does nothing: lastcall is switched off")
            return None
        session = self._driver.session
        with session.no_other_save():
            if self._subject.in_pass:
                session.owe()
                return session.save(self._subject.unfinished(), Kind.MANUAL, "run.save()").path
            if session.up_to_date and session.last is not None:
                return session.last.path
            capture = self._subject.capture()
            if self._subject.behind and not places.ends_pass(sys._getframe(1)):
                session.owe()
                because = (
                    f"saved between the last batch and the end of epoch {self.epoch}, which a resumed run "
                    "does again"
                )
                capture = dataclasses.replace(capture, exact=False, because=because)
            return session.save(capture, Kind.MANUAL, "run.save()").path

    # ---- loops ---------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Numbers:
        """The numbers of the steps that are left, up to `total`. Each pass is one step and ends in a
        boundary."""
        arguments.check_total(total, "steps")
        return Numbers(max(total - self._subject.step, 0), self._numbered_steps(total))

    def _numbered_steps(self, total: int) -> Generator[int, None, None]:
        self._stepping, self._steps = True, total
        self._begin(total)
        subject, gate = self._subject, self._gate
        many = self._driver is not None and self._driver.world.many
        try:
            step = subject.step
            subject.in_pass = step < total
            while step < total:
                yield step
                if many and gate.steps == subject.mark:
                    self._idle()
                step += 1
                # Two stores and no call in a quiet step: no clock (it costs a microsecond between two steps),
                # and nowhere for the interpreter to let another thread see one store without the other.
                subject.step = step
                if step < subject.due:
                    subject.mark = gate.steps
                    continue
                subject.in_pass = False
                self._boundary()
                subject.in_pass = step < total
            subject.in_pass = False
        except GeneratorExit:  # the user's `break`: what the pass has done so far is all it will do
            subject.break_off()
            if gate.steps != subject.mark:
                subject.step += 1
            raise
        finally:
            self._stepping = False

    def epochs(self, total: int, start: int = 0) -> Numbers:
        """The numbers of the epochs that are left, as `range(start, total)` has them. An epoch that was
        interrupted comes again, and batches() continues inside it."""
        arguments.check_total(total, "epochs")
        arguments.check_total(start, "epochs")
        return Numbers(max(total - max(self._subject.epoch, start), 0), self._numbered_epochs(total, start))

    def _numbered_epochs(self, total: int, start: int) -> Generator[int, None, None]:
        subject = self._subject
        self._epochs = total
        if self._resumed is None or subject.loop + 1 != subject.saved_loop:
            # a resumed loop continues where it was, whatever the script has found out
            subject.epoch = max(subject.epoch, start)
        if self._driver is not None:
            self._first_epoch = min(start, total)
            progress = self._driver.context.progress
            progress.total_epochs = total - self._first_epoch
            progress.expect = Forecast(subject, start, total).steps
        self._begin(None)
        again = self._continues
        while subject.epoch < total:
            if self._driver is not None:
                subject.epoch_begins(again=again)
            again = False
            try:
                yield subject.epoch
            finally:
                self._check_came_there()
            subject.went_on()
            if self._skipped:
                # put back where the last loop of the interrupted epoch had ended
                subject.restored_randomness = None
            subject.settle_randomness()
            subject.epoch += 1
            subject.new_epoch()
            self._loops_to_skip, self._skipped = 0, False
            unfinished, subject.in_pass = subject.in_pass, False
            self._boundary(passed=unfinished, epoch_end=True)

    def _check_came_there(self) -> None:
        """An interrupted epoch is over, or was left. What the script decides at its top may depend on what
        was trained since."""
        if self._continues:
            self._continues = False
            self._subject.doubts.add(
                f"epoch {self._subject.epoch} was interrupted inside run.batches(), and in the resumed run "
                "it does not come there",
                "Keep what is decided at the top of an epoch in variables, or decide it at the end of the "
                "epoch before.",
            )

    def batches(self, loader: Any) -> Batches:
        """The batches of a DataLoader, from where the last incarnation was, or the items of anything else
        that can be begun again. Outside steps(), a pass in which an optimizer stepped is one step and ends in
        a boundary; passes of an unfinished accumulation window do not."""
        itself: Itself = []
        batches = self._batches(loader, itself)
        itself.append(weakref.ref(batches))
        return Batches(loader, batches)

    def _batches(self, loader: Any, itself: Itself) -> Generator[Any, None, None]:
        subject = self._subject
        if self._driver is None:
            yield from self._count(loader)
            return
        tracker = subject.tracker(items.unwrapped(loader))
        if self._stepping:
            yield from items.through(tracker, loader, 0)
            return
        subject.went_on()
        if not self._begun:
            repeats.check(sys._getframe(1), self._where, self, subject.doubts, batches=True)
            if self._epochs is None:
                self._in_own_pass(sys._getframe(1))
            self._begin(None)
        elif self._epochs is None:
            self._in_own_pass(sys._getframe(1))
        # The run was interrupted behind this loop: what follows it in the script is still to be done.
        last = self._loops_to_skip == 1 and not subject.batches and not subject.saved_behind
        final = last or self._loops_to_skip == 0
        if self._prelude is not None:
            self._prelude.loop_begins(final=final)
        self._carry(final=final)
        if self._loops_to_skip > 0:  # an earlier loop of the interrupted epoch, which had ended
            self._loops_to_skip -= 1
            self._skipped = True
            if self._loops_to_skip == 0 and not subject.batches:
                self._continues = False
            if last:
                subject.settle_randomness()
            else:
                subject.put_randomness_back()
            return
        subject.settle_randomness()
        if not self._continues:
            subject.batches = 0
        self._continues = False
        subject.length = arguments.length(loader)
        collecting.check(sys._getframe(1), subject.doubts)
        gate, batches = self._gate, items.through(tracker, loader, subject.batches)
        if not subject.batches:
            batches = self._counting.watched(batches, itself)
        elif not self._counting.resume(itself, sys._getframe().f_back, subject.batches, subject.drawn_again):
            subject.loops, subject.batches = subject.loops + 1, 0
            return
        self._looping += 1
        try:
            for batch in batches:
                subject.in_pass = True
                subject.batches += 1
                yield batch
                if gate.steps != subject.mark or (gate.steps == 0 and subject.by_hand.changed()):
                    subject.in_pass = False
                    subject.step += 1
                    subject.inside = True
                    if subject.step >= subject.due:
                        self._boundary()
                    else:
                        subject.mark = gate.steps
        except GeneratorExit:
            # the user's `break`: this loop has ended, and what its last pass has done is all it will do
            subject.break_off()
            subject.loops, subject.batches = subject.loops + 1, 0
            if gate.steps != subject.mark or (gate.steps == 0 and subject.by_hand.changed()):
                subject.in_pass = False
                subject.step += 1
                subject.inside = True
                subject.arrive(time.perf_counter())
            raise
        finally:
            self._looping -= 1
        subject.loops, subject.batches = subject.loops + 1, 0
        if not subject.in_pass:
            subject.refresh_if_stale()

    def _in_own_pass(self, frame: FrameType) -> None:
        """A pass of a `while` loop of the script's own around batches() is an epoch without a number: a
        resumed run begins with the one that was interrupted. It is another pass where the script comes to the
        same place again."""
        if self._own_passes is None:
            self._own_passes = repeats.goes_on(frame, self._where, self)
        if self._own_passes:
            site = repeats.site(frame, self._where)
            if site in self._sites:
                self._sites, self._subject.loops = set(), 0
            self._sites.add(site)
            if self._prelude is not None:
                self._prelude.in_own_pass()

    def _count(self, loader: Any) -> Iterator[Any]:
        """batches() with lastcall off: `run.step` counts all the same."""
        stepped = hooks.Counter()
        models = [
            value for value in self._subject.state.values.values() if isinstance(value, torch.nn.Module)
        ]
        by_hand = hooks.ByHand(parameter for model in models for parameter in model.parameters())
        try:
            self._subject.batches = 0
            for batch in loader:
                before = stepped.steps
                self._subject.batches += 1
                yield batch
                done = stepped.steps != before or (stepped.steps == 0 and by_hand.changed())
                self._subject.step += done and not self._stepping
        finally:
            stepped.remove()

    def tick(self) -> None:
        """The end of a step, in a loop of any other shape."""
        if not self._begun:
            self._check_entered()
            self._begun = True
            self._check_ended(sys._getframe(1))
            if self._carrier is not None:
                self._carrier.ticked(sys._getframe(1))
            repeats.check(sys._getframe(1), self._where, self, self._subject.doubts, batches=False)
            # __enter__ has put the generators back; this step has drawn from them
            self._subject.restored_randomness = None
            if self._prelude is not None:
                self._prelude.end()
            self._prelude = None
        elif not self._ticked and self._epochs is not None:
            repeats.check_in_epoch(sys._getframe(1), self._where, self, self._subject.doubts)
            if self._carrier is not None and not self._looping:
                epoch_top.check(
                    self._carrier.chain(sys._getframe(1)), self._carrier.loses, self._subject.doubts
                )
        if self._subject.step - (self._resumed or 0) < _TICKS:
            repeats.check_tick(sys._getframe(1), self._ticked, self._subject.doubts)
        self._subject.in_pass = False
        if self._gate.steps == self._subject.mark:
            self._idle()
        self._ticking = True
        self._subject.step += 1
        self._boundary()
        self._subject.in_pass = True

    def _check_ended(self, frame: FrameType) -> None:
        """A step of a loop of the script's own: the last incarnation may have ended behind that loop."""
        carrier, resumed = self._carrier, self._resumed
        if carrier is not None and carrier.resumed_over and resumed is not None and not self._again:
            ended.trains_again(carrier.came_to(frame), self.directory, resumed, self._subject.doubts)

    def _outside(self) -> bool:
        """Whether no loop of ours is running, and none of the script's that ticks."""
        return self._entered and not (self._stepping or self._looping or self._ticking)

    def _idle(self) -> None:
        """A pass without an optimizer step. With many ranks it may have failed, unseen, because one of them
        is gone."""
        if self._driver is not None:
            self._driver.session.step_without_optimizer()

    _begun = False
    _prelude: Prelude | None = None  # puts back what a resumed script changes on its way to the loop
    _where: repeats.Entered | None = None  # where the block was entered
    _own_passes: bool | None = None  # batches() is in a `while` loop of the script's own
    _looping = 0  # batches() loops that are running
    _ticking = False
    _first_epoch = 0
    _epochs: int | None = None  # how many there will be, as the script has said
    _steps: int | None = None

    def _begin(self, total: int | None) -> None:
        """The loop begins: the generators are put back, and what is here now is boundary number one of this
        incarnation."""
        self._check_entered()
        self._begun = True
        self._subject.went_on()
        self._subject.loop += 1
        final = self._subject.loop >= self._subject.saved_loop and (
            self._stepping or not self._subject.inside
        )
        if self._prelude is not None:
            self._prelude.loop_begins(final=final)
        if not final:
            # the loop that was interrupted will do it again, after what the script does before it
            self._subject.put_randomness_back()
        else:
            self._subject.settle_randomness()
        if self._driver is not None:
            self._subject.loop_begins()
            self._driver.context.progress.total = total
            if self._resumed is not None and final and self._over():
                endings.nothing_left(self.directory, self._subject.step, self._again)
            self._carry(final=final)
            self._boundary(passed=False)

    def _carry(self, *, final: bool) -> None:
        if self._carrier is not None:
            self._carrier.begin(sys._getframe(1), final=final)

    def _check_entered(self) -> None:
        if self._driver is not None and not self._entered:
            raise RuntimeError("use protect() in a with block: with lastcall.protect(...) as run: ...")

    def _boundary(self, *, passed: bool = True, epoch_end: bool = False) -> None:
        if self._driver is None:
            return
        self._subject.arrive(time.perf_counter(), passed=passed)
        self._driver.at_boundary(epoch_end=epoch_end)

    # ---- the block -----------------------------------------------------------------------------------------

    _entered = False

    def __enter__(self) -> Run:
        driver = self._driver
        if driver is None:
            self._entered = True
            return self
        self._pid = os.getpid()
        session = driver.begin(lambda: self._subject.install(driver.gate))
        entry = session.resumed
        if entry is not None:
            self._load(driver, entry)
        self._entered = True
        self._where = repeats.entered(sys._getframe(1))
        self._resumed = None if entry is None else entry.record.step
        self._again = endings.again(self.directory) and entry is not None
        self.left_early = entry is not None and endings.announce(self.directory, entry, self._again)
        # a run that diverged stays different
        if entry is not None and not entry.record.exact and not self._subject.doubts:
            self._subject.doubts.resume(
                [f"resumed from {entry.path.name}, which was not exact: {entry.record.because}"]
            )
        self._loops_to_skip = self._subject.loops if self._subject.inside else 0
        self._continues = self._subject.inside
        self._subject.block_begins()
        if self._carrier is not None:
            # the script has its variables as the first run left them, or as it has changed them since
            if self._again:
                self._carrier.pending = {}
            self._carrier.enter(sys._getframe(1))
        if type(self._subject) is TorchSubject:
            self._prelude = Prelude(self._subject, session.engine, driver.world, entry)
            self._subject.taken = self._prelude.taken
        self._subject.by_hand.changed()  # what was restored is no step
        self._subject.arrive(time.perf_counter(), passed=False)
        # last: it waits for other ranks, and there is something to be rescued now
        self._subject.together.settle_buckets()
        return self

    def _load(self, driver: Driver, entry: Entry) -> None:
        """What an adapter loads from the checkpoint itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        driver = self._driver
        # a child that was forked inside the block unwinds it: the run is not its own
        if driver is None or os.getpid() != self._pid:
            return
        left: BaseException | None = error
        try:
            if error is None:
                left = self._leave_well(driver)
            elif not isinstance(error, errors.Preempted):
                left = self._leave_raising(driver, error)
        finally:
            if driver.outcome is Outcome.FINISHED:
                endings.finished(self.directory)
            driver.end()
        left = driver.leave(left)
        if left is not None and left is not error:
            raise left from error

    def _over(self) -> bool | None:
        """Whether training has come to its end: None where unknown. All who say "finished" ask here."""
        if self._epochs is not None:
            return self._subject.epoch >= self._epochs
        return None if self._steps is None else self._subject.step >= self._steps

    def _leave_raising(self, driver: Driver, error: BaseException) -> BaseException:
        """An exception leaves the block. sys.exit() without a notice is the script's own word that it is
        done; whether training is, is another matter."""
        # a handler of the script's own may have raised this, and the notice be on its way to us
        driver.settle_signals()
        by_choice = isinstance(error, SystemExit) and not error.code
        if by_choice and not driver.world.many and not driver.notified and self._over():
            return self._leave_well(driver) or error
        self._subject.mend()
        left = driver.session.failed(error) or error
        ended = (
            Outcome.FINISHED if by_choice and self._over() else Outcome.LEFT if by_choice else Outcome.FAILED
        )
        driver.context.outcome.decide_if_open(ended)
        return left

    def _leave_well(self, driver: Driver) -> BaseException | None:
        """The block ended without an exception: training is over, unless a notice was served and somebody
        swallowed Preempted."""
        if driver.outcome in (Outcome.SAVED, Outcome.NOT_SAVED):
            return driver.session.preempted()
        try:
            unfinished, self._subject.in_pass = self._subject.in_pass, False
            self._subject.arrive(time.perf_counter(), passed=unfinished and not self._ticking)
            self._subject.refresh_if_stale()
            self._check_counted()
            self._subject.look_for_overlooked(last=True)
            self._loop_is_over()
            driver.session.finish(
                endings.reason(self._over(), self.step, self._steps, self.epoch, self._epochs)
            )
        except (errors.Preempted, errors.SaveError) as left:
            # SaveError: the end of training could not be saved
            return left
        return None

    def _loop_is_over(self) -> None:
        """A loop of the script's own has ended. Where there was none, or not a step of it, the run may have
        finished before."""
        carrier, resumed = self._carrier, self._resumed
        if carrier is None or self._over() is not None:
            return
        if self._begun:
            carrier.loop_is_over()
        elif carrier.resumed_over and resumed == self._subject.step and not self._again:
            endings.nothing_left(self.directory, resumed, False)

    def _check_counted(self) -> None:
        """A run that has trained outside of all loops has finished at step 0, and does all of it again."""
        subject, overlooked = self._subject, self._subject.overlooked
        trained = (
            overlooked is not None
            and not self._ticking
            and (overlooked.missed or (not self._begun and subject.by_hand.changed()))
        )
        if overlooked is not None and trained and not overlooked.told_of_missing:
            overlooked.miss()
