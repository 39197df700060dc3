"""One train() call of a Trainer, protected: the session around it, its boundaries, and what follows a
save."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import SaveStrategy

from lastcall import errors, settings
from lastcall.adapters.torch.driver import Driver
from lastcall.adapters.transformers import arguments, calls, choosing, listeners
from lastcall.adapters.transformers.ledger import AFTER_STEP, NOTHING, Pending
from lastcall.adapters.transformers.subject import LEDGER_FILE, TrainerSubject, read_ledger
from lastcall.core.checkpoint.catalog import PRIVATE
from lastcall.core.checkpoint.record import Entry
from lastcall.core.checkpoint.retention import Keep
from lastcall.core.process import exits
from lastcall.core.proof import witness
from lastcall.core.restore import restore
from lastcall.core.restore.contents import small_file
from lastcall.core.session import Session
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig
from lastcall.types import Kind, Outcome

log = logging.getLogger("lastcall")
_TO_THE_END = (SaveStrategy.STEPS, SaveStrategy.EPOCH)  # Transformers' own last save is of the last step
_STRATEGIES = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)


class TrainerRun:
    def __init__(
        self, trainer: Any, jit: JITCheckpointConfig, periodic: PeriodicCheckpointConfig | None
    ) -> None:
        self.trainer = trainer
        self.jit = jit = witness.adjusted(jit)
        self.stepped = False  # on_step_end has come, and what follows it has not
        self.resumed: int | None = None
        self._path: str | None = None
        self._noted = False  # the directory knows of this call
        self._over = False  # the run was at its last step when it was saved: only what follows it is left
        self.former: dict[str, Any] = {}  # the methods that ours are in front of
        self._said: dict[str, float] = {}
        # saves that the callbacks have not been told of: step, and the state then
        self._to_tell: list[tuple[int, Any]] = []
        arguments.override(trainer.args, periodic)
        arguments.redirect(trainer.args, jit)
        root = Path(trainer._get_output_dir(None))
        self.subject = TrainerSubject(trainer, root / PRIVATE)
        none = PeriodicCheckpointConfig(save_strategy="no", save_total_limit=trainer.args.save_total_limit)
        tensors = iter(()) if trainer.model is None else iter(trainer.model.parameters())
        self.start = choosing.Start(trainer, jit.run_id, root)
        self._folder = root  # as HF calls it: what is in trainer_state.json is what it would have written
        self.driver = Driver(
            root, self.subject, arguments.suited(jit), none, tensors, run=self.start.run,
            background_saves=trainer.args.save_strategy != SaveStrategy.NO,
        )  # fmt: skip
        self.start.check = lambda entry: restore.verify(entry, self.session.engine)

    # ---- begin ---------------------------------------------------------------------------------------------

    def begin(self, wanted: str | bool | None) -> str | None:
        """Everything before train(). Returns the checkpoint for it to resume from."""
        entry = self.driver.begin().resumed
        try:
            if entry is not None:
                self.subject.saved = read_ledger(json.loads(small_file(entry, LEDGER_FILE)))
                self._keep_best(entry)
            chosen = choosing.choose(self.trainer, entry, self.subject.saved, wanted, self.start)
            self._begin_somewhere(chosen, wanted)
            if not chosen.ours and (named := self._one_of_ours(chosen.path)) is not None:
                entry, chosen = named, dataclasses.replace(chosen, ours=True)
                self.session.forget_resumed()
        except BaseException:
            self.end(errors.Preempted(1, ""))
            raise
        if chosen.ours:
            assert entry is not None
            self.resumed = entry.record.step
            pending = Pending(**(self.subject.saved or {})["pending"])
            if pending.stop_epoch or pending.phase == "epoch":
                self.subject.position.leave()
        else:
            self.subject.saved = None
            self.subject.step = 0
            self.session.forget_resumed()
            self.subject.position.forget()
        self._path = chosen.path
        self.subject.ledger.origin = chosen.origin
        for tell in listeners.begun:
            tell(self)
        return chosen.path

    def _begin_somewhere(self, chosen: choosing.Chosen, wanted: str | bool | None) -> None:
        """resume_from_checkpoint=True in a folder without a checkpoint: an error, as Transformers says; under
        `lastcall run` the first start has the same command as all that follow."""
        if wanted is True and chosen.path is None:
            if settings.registry_folder() is None:
                raise ValueError(f"No valid checkpoint found in output directory ({self.root})")
            log.warning(
                "resume_from_checkpoint=True, but %s holds no checkpoint: training begins at step 0",
                self.root,
            )
        elif chosen.path is None:
            log.info("Starting from the beginning: %s holds no checkpoint of this run", self.root)
        if self.driver.world.rank == 0:
            self._noted = True
            self.start.note()

    def _keep_best(self, entry: Entry) -> None:
        """load_best_model_at_end will look for it in the directory: one that is new may lack it, and rotation
        must not take it before HF saves for the first time."""
        if entry.record.file("trainer_state.json") is None:
            return
        best = json.loads(small_file(entry, "trainer_state.json")).get("best_model_checkpoint")
        if best:
            catalog, name = self.driver.context.catalog, Path(best).name
            catalog.keep = dataclasses.replace(catalog.keep, always=frozenset({name}))
            self.session.bring(name, "start")  # what one rank finds, all must find

    @property
    def listening(self) -> bool:
        """Whether signals reach this run."""
        return self.driver.listening

    @property
    def session(self) -> Session:
        return self.driver.session

    @property
    def root(self) -> Path:
        return self.driver.context.catalog.root

    def _one_of_ours(self, path: str | None) -> Entry | None:
        """An older checkpoint of this run, which the script names: checked, and taken with all that we know
        of it."""
        session, world = self.session, self.driver.world
        found = [
            entry
            for entry in self.driver.context.catalog.entries()
            if path and entry.path.resolve() == Path(path).resolve()
        ]
        for entry in found:
            restore.load(
                entry, session.engine, self.subject, verify_first=True, rank=world.rank, size=world.size
            )
            self.subject.saved = read_ledger(json.loads(small_file(entry, LEDGER_FILE)))
        return found[0] if found else None

    def train_begins(self) -> None:
        """In on_train_begin: the trainer has its model, its optimizer and its place in the data."""
        trainer, subject, progress = self.trainer, self.subject, self.driver.context.progress
        subject.take_up(self.driver.gate)
        self._find_best()
        subject.step = trainer.state.global_step
        subject.ledger.pending = NOTHING
        subject.tally.began, subject.ledger.first = time.monotonic(), trainer.state.global_step
        progress.total = trainer.state.max_steps
        progress.total_epochs = trainer.state.num_train_epochs
        if subject.saved is not None:
            origin = subject.ledger.origin
            subject.ledger.load_state_dict(subject.saved)
            subject.ledger.origin = origin
            subject.ledger.pending = _lengthened(
                subject.ledger.pending, subject.saved["state"], trainer.state
            )
            subject.tally.load_state_dict(subject.saved_tally)
            subject.saved = None
            self._set_bars()
            if trainer.state.global_step >= trainer.state.max_steps:
                log.warning(
                    "This run has already ended (step %d of %d): nothing is left to train. To start over, "
                    "give it "
                    "another output_dir, or another LASTCALL_RUN_ID",
                    trainer.state.global_step,
                    trainer.state.max_steps,
                )
            self._catch_up(subject.ledger.pending)
        subject.arrive(time.perf_counter(), passed=False)
        subject.together.settle_buckets()
        self._at_boundary()
        subject.in_pass = True

    def _find_best(self) -> None:
        """HF forgets its best checkpoint where the directory that it was in is not there any more: the run
        may have moved."""
        state = self.trainer.state
        best = self._folder / f"checkpoint-{state.best_global_step}"
        if not (state.best_model_checkpoint and Path(state.best_model_checkpoint).is_dir()) and best.is_dir():
            state.best_model_checkpoint = str(best)

    def _catch_up(self, pending: Pending) -> None:
        """Do what followed the last step of the former incarnation and was not done. The generators are where
        they were then, and HF gets them as they are afterwards."""
        trainer = self.trainer
        self._over = pending.stop
        trainer.control.should_training_stop = pending.stop
        if pending.phase:
            self.former["_load_rng_state"](self._path)
            # as it was then; a subclass logs other things for a model that does not train (TRL)
            trainer.model_wrapped.train()
            if pending.log or pending.evaluate or pending.save:
                log.info("Step %d: catching up on what should have followed it", trainer.state.global_step)
            self._follow_up(pending)
            told = trainer.control  # an evaluation may have said so just now
            stops = pending.stop_epoch or pending.stop or told.should_epoch_stop or told.should_training_stop
            if pending.phase == "step" and (stops or self.subject.position.ended):
                trainer.control = trainer.callback_handler.on_epoch_end(
                    trainer.args, trainer.state, trainer.control
                )
                self._follow_up(_asked(trainer.control, "epoch"))
            self._over = trainer.control.should_training_stop
            put_back = self.subject.remembered()
            trainer._load_rng_state = lambda checkpoint: put_back()
        self.subject.ledger.pending = Pending(stop=self._over)

    def _follow_up(self, pending: Pending) -> None:
        trainer, control = self.trainer, self.trainer.control
        self.subject.ledger.pending = pending
        control.should_log, control.should_evaluate, control.should_save = (
            pending.log,
            pending.evaluate,
            pending.save,
        )
        self.former["_maybe_log_save_evaluate"](
            trainer._tr_loss,
            pending.grad_norm,
            trainer.model_wrapped,
            None,
            trainer.state.epoch,
            None,
            time.time(),
            learning_rate=pending.learning_rate,
        )
        control._new_step()

    def _set_bars(self) -> None:
        """A bar that begins at 0 takes all former steps for those of the first second."""
        step = self.trainer.state.global_step
        for callback in self.trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None) if isinstance(callback, ProgressCallback) else None
            if bar is not None:
                bar.initial = bar.n = bar.last_print_n = callback.current_step = step
                bar.refresh()

    @property
    def over(self) -> bool:
        return self._over

    # ---- boundaries ----------------------------------------------------------------------------------------

    def after_step(self, grad_norm: Any, learning_rate: float | None) -> None:
        """Between the end of a step and what follows it: the boundary. Or between the end of an epoch and
        what follows that."""
        trainer, subject = self.trainer, self.subject
        control = trainer.control
        self.leave_if_saved()
        stepped, self.stepped = self.stepped, False
        pending = AFTER_STEP if stepped else Pending("epoch")
        follows = control.should_log or control.should_evaluate or control.should_save
        if follows or control.should_epoch_stop or control.should_training_stop:
            pending = _asked(control, pending.phase)
            if control.should_log:
                norm = None if grad_norm is None else float(grad_norm)
                pending = dataclasses.replace(pending, grad_norm=norm, learning_rate=learning_rate)
        subject.ledger.pending = pending
        subject.step = step = trainer.state.global_step
        if stepped and step < subject.due and not pending.evaluate and not pending.save:
            subject.mark = self.driver.gate.steps
            return
        subject.in_pass = False
        subject.arrive(time.perf_counter(), passed=stepped)
        if control.should_evaluate:
            subject.refresh_now()
        self._at_boundary()
        subject.in_pass = True

    def _at_boundary(self) -> None:
        self._tell_callbacks()
        self.driver.at_boundary()

    def before_evaluation(self) -> None:
        """What was logged is logged: an evaluation that is interrupted is begun again, and nothing else."""
        subject = self.subject
        if subject.training and subject.ledger.pending.phase:
            subject.ledger.pending = dataclasses.replace(subject.ledger.pending, log=False)
            if subject.settled:
                subject.refresh_now()

    def followed_up(self) -> None:
        """All that follows a step, or an epoch, is done."""
        control, ledger = self.trainer.control, self.subject.ledger
        # an evaluation may have said so
        stop, stop_epoch = control.should_training_stop, control.should_epoch_stop
        ends = ledger.pending.phase == "step" and (stop or stop_epoch or self.subject.position.ended)
        if stop or stop_epoch:
            ledger.pending = Pending("step" if ends else "", stop=stop, stop_epoch=stop_epoch)
        else:
            ledger.pending = AFTER_STEP if ends else NOTHING

    def logged(self, logs: dict[str, Any]) -> None:
        """Progress, for observers."""
        state = self.trainer.state
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        evaluated = {name: value for name, value in numbers.items() if name.startswith("eval_")}
        trained = {name: value for name, value in numbers.items() if name not in evaluated}
        if trained:  # the last line of a run says how long it took, and not what the loss was
            trained = self._said = {**self._said, **trained}
        self.driver.context.progress.update(
            state.global_step, state.epoch, trained or None, evaluated or None
        )

    def leave_if_saved(self) -> None:
        """Called often inside long work: a rescue may have answered the notice."""
        self.session.leave_if_saved()

    # ---- saves that HF asks for ----------------------------------------------------------------------------

    def save(self) -> None:
        """Instead of Trainer._save_checkpoint: the same files, written by us while training continues."""
        trainer, session = self.trainer, self.session
        self.leave_if_saved()
        state = trainer.state
        self.subject.ledger.pending = dataclasses.replace(
            self.subject.ledger.pending,
            log=False, evaluate=False, save=False,  # done, or by this save
            stop=trainer.control.should_training_stop, stop_epoch=trainer.control.should_epoch_stop,
        )  # fmt: skip
        root = self._folder
        if trainer.args.save_strategy in _STRATEGIES and state.best_global_step:
            best = root / f"checkpoint-{state.best_global_step}"
            session.wait_for_background()
            if state.best_global_step == state.global_step or session.has(best.name):
                state.best_model_checkpoint = str(best)
        kept = {Path(state.best_model_checkpoint).name} if state.best_model_checkpoint else set()
        self.driver.context.catalog.keep = Keep(trainer.args.save_total_limit, always=frozenset(kept))
        if trainer.hp_search_backend is None:
            trainer.store_flos()
        if session.open:  # the notice came during the evaluation: this save is the one that answers it
            self.subject.arrive(time.perf_counter(), passed=False)
            session.at_boundary()
        self.subject.metrics = {} if state.best_metric is None else {"best": state.best_metric}
        self.subject.full = not trainer.args.save_only_model
        try:
            session.save_in_background(f"save_strategy={trainer.args.save_strategy.value}")
        finally:
            self.subject.full = True
        if trainer.args.push_to_hub:
            session.wait_for_background()
            self.former["_push_from_checkpoint"](str(root / f"checkpoint-{state.global_step}"))

    def saved(self, state: Any) -> None:
        """Instead of on_save, which comes when the checkpoint is there."""
        told = copy.copy(state)
        told.log_history = list(state.log_history)
        self._to_tell.append((state.global_step, told))
        self._tell_callbacks()

    def _tell_callbacks(self, *, wait: bool = False) -> None:
        if not self._to_tell or (self.session.saving_in_background and not wait):
            return
        self.session.wait_for_background()
        waiting, self._to_tell = self._to_tell, []
        for step, state in waiting:
            if self.session.has(f"checkpoint-{step}"):
                self._on_save(state)

    def _on_save(self, state: Any) -> None:
        trainer = self.trainer
        trainer.callback_handler.call_event("on_save", trainer.args, state, trainer.control)

    # ---- end -----------------------------------------------------------------------------------------------

    def finish(self, start_time: float) -> float:
        """All steps are done; what is left (the best model, the last words) needs no checkpoint. Returns when
        training would have begun had it never been interrupted: so speed and loss are those of the whole
        run."""
        session = self.session
        self.leave_if_saved()
        session.wait_for_background()
        self._tell_callbacks(wait=True)
        wanted = self.trainer.args.save_strategy in _TO_THE_END and not session.up_to_date
        session.finish(save=wanted and self.subject.step > 0)
        catalog = self.driver.context.catalog
        if (
            self.driver.outcome is Outcome.FINISHED
            and catalog.held
            and self.trainer.args.save_strategy != SaveStrategy.NO
        ):
            last = self.trainer.args.save_strategy in _TO_THE_END
            catalog.prune(dataclasses.replace(catalog.keep, over=True, resumable=last))
        best = self.trainer.state.best_model_checkpoint
        if self.trainer.args.load_best_model_at_end and best:
            session.bring(Path(best).name, "end")
        self.subject.training = False
        self.trainer._initial_global_step = self.subject.ledger.first
        return start_time - self.subject.tally.before

    def end(self, error: BaseException | None) -> BaseException | None:
        """After train(), however it ended. Returns what is to be raised instead, or does not return."""
        driver, left = self.driver, error
        try:
            if error is not None and not isinstance(error, errors.Preempted):
                if (
                    driver.outcome is not Outcome.FINISHED
                    and (preempted := self.session.failed(error)) is not None
                ):
                    left = preempted
                driver.context.outcome.decide_if_open(Outcome.FAILED)
            elif error is None and driver.outcome in (Outcome.SAVED, Outcome.NOT_SAVED):
                # somebody swallowed Preempted
                left = self.session.preempted()
            if driver.outcome is Outcome.SAVED and self.subject.training:
                self._last_word(int(left.code or 1) if isinstance(left, errors.Preempted) else 1)
        finally:
            if driver.outcome is Outcome.FINISHED and driver.notified:
                log.info("Training is finished: the notice needs no answer")
            if driver.saved:
                calls.not_over(self.root)
            if self._noted:
                self.start.note(self._ended())
            driver.end()
        return driver.leave(left)

    def _ended(self) -> str:
        notice, outcome = self.driver.context.latch.notice, self.driver.outcome
        if outcome is Outcome.SAVED and notice is not None and notice.signum == signal.SIGINT:
            return calls.INTERRUPTED  # a person asked: what comes next is a person's, too
        return {Outcome.FINISHED: calls.FINISHED, Outcome.SAVED: calls.SAVED}.get(
            outcome or Outcome.FAILED, ""
        )

    def _last_word(self, code: int) -> None:
        """on_save for the checkpoint that answered the notice, for as long as there is time: a periodic one
        may have, and then it is among those that are still to be told."""
        entry = self.session.last
        for_it = entry is not None and entry.record.kind in (Kind.JIT, Kind.RESCUE, Kind.SURVIVORS)
        left = self.session.deadline - self.driver.context.clock.now()
        watchdog = threading.Timer(max(1.0, left - 0.5), exits.leave, [code])
        watchdog.daemon = True
        watchdog.start()
        try:
            self._tell_callbacks(wait=True)
            if for_it:
                self._on_save(self.trainer.state)
        except Exception:
            log.exception("A callback's on_save failed; the checkpoint is still committed")
        finally:
            watchdog.cancel()


def _lengthened(pending: Pending, saved: dict[str, Any], state: Any) -> Pending:
    """A run that had come to its last step, and has more of them now, continues."""
    was_last = saved.get("max_steps") is not None and saved["global_step"] >= saved["max_steps"]
    return (
        dataclasses.replace(pending, stop=False)
        if was_last and state.global_step < state.max_steps
        else pending
    )


def _asked(control: Any, phase: str) -> Pending:
    return Pending(
        phase,
        log=control.should_log,
        evaluate=control.should_evaluate,
        save=control.should_save,
        stop_epoch=control.should_epoch_stop,
        stop=control.should_training_stop,
    )
