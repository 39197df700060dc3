"""protect() and Run: what a training script sees.

    with lastcall.protect("runs/exp1", model=model, optimizer=opt) as run:
        for step in run.steps(10_000):
            ...

A run has one loop. `steps` ends every pass in a boundary; `epochs`/`batches` end those passes in one in which an optimizer stepped;
`tick` says so by hand.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from lastcall import errors, settings
from lastcall.adapters.torch import hooks, pinned
from lastcall.adapters.torch import world as worlds
from lastcall.adapters.torch.protection import Protection
from lastcall.adapters.torch.subject import TorchSubject
from lastcall.core import mirror
from lastcall.core.catalog import Entry
from lastcall.core.gate import Gate
from lastcall.core.session import Session
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.storage.files import Files
from lastcall.types import Kind, Outcome

log = logging.getLogger("lastcall")
T = TypeVar("T")


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
    """Protect a training run: save `state` into `directory` when the run is told to stop, and go on from there next time.

    `state` is anything with state_dict/load_state_dict, tensors, numpy arrays, DataLoaders and JSON-like values. What cannot be
    saved is refused here (StateError names it). `guard`: keep a copy in shared memory, so that also a killed process loses little
    (the same as in `config`). `files` is for tests: a file system that fails on demand (lastcall.testing).
    `accelerator`: an accelerate.Accelerator. What it has prepared is saved and loaded by its own save_state() and load_state(), and
    left out of `state`.
    """
    jit = config if config is not None else JITCheckpointConfig()
    if guard is not None:
        jit = settings.changed(jit, guard=guard)
    periodic = periodic if periodic is not None else PeriodicCheckpointConfig()
    if accelerator is not None and jit.enabled:
        from lastcall.adapters.accelerate.run import AcceleratorRun  # whoever has an accelerator has accelerate

        return AcceleratorRun(accelerator, Path(directory), jit, periodic, state, files)
    return Run(Path(directory), jit, periodic, TorchSubject(state, check=jit.enabled), files)


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
        self._session: Session | None = None
        if jit.enabled:
            mirror.reserve(jit.mirror, directory)
            world = worlds.find(jit)
            self._subject.together.among(world.rank, world.size)
            allocate = pinned.allocator(self._subject.state.tensors())
            self._session = Session(directory, self._subject, jit, periodic, files=files, allocate=allocate, world=world)
            self._session.metrics = self._subject.numbers
            self._gate = self._session.gate
        self._resumed: int | None = None
        self._loops_to_skip = 0
        self._skipped = False
        self._stepping = False  # inside run.steps(): batches are the user's own business

    # ---- what a user asks ------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self._subject.step

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._subject.epoch

    @property
    def resumed(self) -> int | None:
        """The step that this incarnation went on from, or None for a fresh start."""
        return self._resumed

    @property
    def state(self) -> dict[str, object]:
        """The values handed to protect(), by name. Values that cannot be changed in place (numbers, text, tuples) are brought back
        here, and saved from here: `run.state["best"] = 0.93`."""
        return self._subject.state.values

    def report(self, **metrics: Any) -> None:
        """Progress: anything that can become a number. Tensors are not waited for. Metrics are kept with the next checkpoints."""
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                metrics[name] = value.detach()  # the graph behind a loss would be kept alive
        self._subject.metrics = metrics
        if self._session is not None:
            self._session.progress.update(self._subject.step, self._subject.epoch, metrics)

    def save(self) -> Path | None:
        """Save now. Between two steps the checkpoint is exact. Inside a step it is saved at once as it is, marked as not exact, and
        an exact one follows at the end of the step. Returns the checkpoint's folder; None when lastcall is off."""
        session = self._session
        if session is None:
            log.warning("run.save() does nothing: lastcall is switched off")
            return None
        session.background.wait()
        with session.saving:
            if self._subject.in_pass:
                session.background.owe()
                return session.save(self._subject.unfinished(), Kind.MANUAL, "run.save()").path
            if session.committed == self._subject.boundary and session.saver.last is not None:
                return session.saver.last.path
            return session.save(self._subject.capture(), Kind.MANUAL, "run.save()").path

    # ---- loops -----------------------------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are left, up to `total`. Each pass is one step and ends in a boundary."""
        _check_total(total, "steps")
        self._stepping = True
        self._begin(total)
        subject, gate = self._subject, self._gate
        many = self._session is not None and self._session.ranks is not None
        try:
            step = subject.step
            subject.in_pass = step < total
            while step < total:
                yield step
                if many and gate.steps == subject.mark:
                    self._idle()
                step += 1
                # Two stores and no call in a quiet step: no clock (it costs a microsecond between two steps), and nowhere for the
                # interpreter to let another thread see one store without the other.
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

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs that are left. An epoch that was interrupted comes again, and batches() goes on inside it."""
        _check_total(total, "epochs")
        self._begin(None)
        subject = self._subject
        while subject.epoch < total:
            yield subject.epoch
            subject.went_on()
            if self._skipped:
                subject.restored_randomness = None  # put back where the last loop of the interrupted epoch had ended
            subject.settle_randomness()
            subject.epoch += 1
            subject.new_epoch()
            self._loops_to_skip, self._skipped = 0, False
            unfinished, subject.in_pass = subject.in_pass, False
            self._boundary(passed=unfinished, epoch_end=True)

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of a DataLoader, from where the last incarnation was. Outside steps(), a pass in which an optimizer stepped
        is one step and ends in a boundary; passes of an unfinished accumulation window do not."""
        subject, session = self._subject, self._session
        if session is None:
            yield from self._count(loader)
            return
        tracker = subject.tracker(loader)
        if self._stepping:
            yield from tracker.iterate()
            return
        subject.went_on()
        if not self._begun:
            self._begin(None)
        if self._loops_to_skip > 0:  # an earlier loop of the interrupted epoch, which had ended
            self._loops_to_skip -= 1
            self._skipped = True
            subject.put_randomness_back()
            return
        subject.settle_randomness()
        gate = self._gate
        try:
            for batch in tracker.iterate():
                subject.in_pass = True
                yield batch
                if gate.steps != subject.mark:
                    subject.in_pass = False
                    subject.step += 1
                    subject.inside = True
                    if subject.step >= subject.due:
                        self._boundary()
                    else:
                        subject.mark = gate.steps
        except GeneratorExit:  # the user's `break`: this loop has ended, and what its last pass has done is all it will do
            subject.break_off()
            subject.loops += 1
            if gate.steps != subject.mark:
                subject.in_pass = False
                subject.step += 1
                subject.inside = True
                subject.arrive(time.perf_counter())
            raise
        subject.loops += 1
        if not subject.in_pass:
            subject.refresh_if_stale()

    def _count(self, loader: Any) -> Iterator[Any]:
        """batches() with lastcall off: `run.step` counts all the same."""
        stepped = hooks.Counter()
        try:
            for batch in loader:
                before = stepped.steps
                yield batch
                self._subject.step += stepped.steps != before and not self._stepping
        finally:
            stepped.remove()

    def tick(self) -> None:
        """The end of a step, in a loop of any other shape."""
        if not self._begun:
            self._check_entered()
            self._begun = True
            self._subject.restored_randomness = None  # __enter__ has put the generators back; this step has drawn from them
        self._subject.in_pass = False
        if self._gate.steps == self._subject.mark:
            self._idle()
        self._ticking = True
        self._subject.step += 1
        self._boundary()
        self._subject.in_pass = True

    def _idle(self) -> None:
        """A pass without an optimizer step. With many ranks it may have failed, unseen, because one of them is gone."""
        if self._session is not None and self._session.joint is not None:
            self._session.joint.bereft()

    _begun = False
    _ticking = False

    def _begin(self, total: int | None) -> None:
        """The loop begins: the generators are put back, and what is here now is boundary number one of this incarnation."""
        self._check_entered()
        self._begun = True
        self._subject.went_on()
        if self._subject.inside and not self._stepping:
            self._subject.put_randomness_back()  # batches() will do it again, after what the script does at the top of the epoch
        else:
            self._subject.settle_randomness()
        if self._session is not None:
            if self._stepping and self._subject.drawn_early():
                log.warning(
                    "Batches were drawn before run.steps() began, as in zip(loader, run.steps(n)): put run.steps() first, or the "
                    "position of the data is one batch ahead at every boundary"
                )
            self._session.progress.total = total
            self._boundary(passed=False)

    def _check_entered(self) -> None:
        if self._session is not None and not self._entered:
            raise RuntimeError("use protect() in a with block: with lastcall.protect(...) as run: ...")

    def _boundary(self, *, passed: bool = True, epoch_end: bool = False) -> None:
        session, subject = self._session, self._subject
        if session is None:
            return
        subject.arrive(time.perf_counter(), passed=passed)
        if subject.step >= subject.due or epoch_end:
            self._protection.rearm()
            session.at_boundary(epoch_end=epoch_end)
            subject.attend_from(session.next_due())
            if session.serving.open:  # it opened while we were looking
                subject.due = 0

    # ---- the block -------------------------------------------------------------------------------------------------------------

    _entered = False

    def __enter__(self) -> Run:
        session = self._session
        if session is None:
            self._entered = True
            return self
        self._protection = Protection(session, self._jit)
        self._protection.begin()
        try:
            self._subject.install(session.gate)
            entry = self._start(session)
        except BaseException:
            self._let_go()
            raise
        self._entered = True
        self._resumed = None if entry is None else entry.record.step
        self._loops_to_skip = self._subject.loops if self._subject.inside else 0
        self._subject.put_randomness_back()
        self._subject.arrive(time.perf_counter(), passed=False)
        self._subject.together.settle_buckets()  # last: it waits for other ranks, and there is something to be rescued now
        return self

    def _start(self, session: Session) -> Entry | None:
        """Restore. Returns the checkpoint that the run goes on from."""
        return session.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        session = self._session
        if session is None:
            return
        left: BaseException | None = error
        try:
            if error is None:
                left = self._leave_well(session)
            elif not isinstance(error, errors.Preempted):
                by_choice = isinstance(error, SystemExit) and not error.code  # sys.exit(): the script says that it is done
                if not by_choice or session.joint is not None:
                    self._subject.mend()
                    left = session.failed(error) or error
                if by_choice and left is error:
                    session.outcome = Outcome.FINISHED
                session.outcome = session.outcome or Outcome.FAILED
        finally:
            self._close(session)
        left = self._protection.leave(left)
        if left is not None and left is not error:
            raise left from error

    def _leave_well(self, session: Session) -> BaseException | None:
        """The block ended without an exception: training is over, unless a notice was served and somebody swallowed Preempted."""
        try:
            if session.outcome in (Outcome.SAVED, Outcome.NOT_SAVED):
                session.serving.at_boundary()
            unfinished, self._subject.in_pass = self._subject.in_pass, False
            self._subject.arrive(time.perf_counter(), passed=unfinished and not self._ticking)
            self._subject.refresh_if_stale()
            session.finish()
        except errors.Preempted as preempted:
            return preempted
        return None

    def _close(self, session: Session) -> None:
        saved = session.outcome is Outcome.SAVED
        session.stop()
        self._let_go(ignore=saved)

    def _let_go(self, *, ignore: bool = False) -> None:
        self._subject.remove()
        self._protection.let_go(ignore=ignore)


def _check_total(total: object, what: str) -> None:
    if type(total) is not int or total < 0:
        raise ValueError(f"run.{what}({total!r}): give the number of {what} as a whole number of at least 0")
