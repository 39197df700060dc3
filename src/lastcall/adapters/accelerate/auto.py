"""Scripts with an Accelerator that know nothing of lastcall: a notice makes them take their own save branch, and leave.

    if step % 500 == 0:
        accelerator.save_state(f"{out}/step_{step}")

At the first completed optimizer step the branch is looked for in the source of the frames that led there. From then on signals are
listened to. After a notice, at a completed step (with many ranks: at one that all have agreed on), the branch is entered as though its
condition were true; when the frame has left its body, the process leaves with the code for "saved". The script resumes as it always
has. A Trainer and protect() have better ways: under them nothing is done here.
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import functools
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from lastcall import clock as clocks
from lastcall import errors, settings
from lastcall.adapters.accelerate import atomic, resuming
from lastcall.adapters.accelerate.company import Company
from lastcall.adapters.torch import world as worlds
from lastcall.core.checkpoint import handover
from lastcall.core.process import exits, job_identity, registry
from lastcall.core.save.budget import Budget
from lastcall.core.store import Store
from lastcall.script import Script, find
from lastcall.settings import JITCheckpointConfig
from lastcall.shield.listening import Guarded
from lastcall.types import Notice, Outcome

log = logging.getLogger("lastcall")
_MARK = "_lastcall_original"
_LOOK = 0.25  # seconds between two looks at what the launcher says
_POLL = 0.05  # seconds between two looks at what the other ranks say
_MARGIN = 0.5  # seconds of steps between the word and the step it is about: all ranks have heard it by then
_READING = 5.0  # seconds that rank 0 gives the others to read the last word
_OURS = ("transformers.", "lastcall.")


def protect_all(module: ModuleType) -> None:
    """For accelerate.accelerator, from the bootstrap."""
    jit = JITCheckpointConfig()
    kind, optimizer = module.Accelerator, module.AcceleratedOptimizer
    if not jit.enabled or hasattr(kind.save_state, _MARK):
        return
    watch = Watch(jit)
    save_state, load_state, step = kind.save_state, kind.load_state, optimizer.step

    @functools.wraps(save_state)
    def save(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if watch.idle:
            return save_state(self, output_dir, *args, **kwargs)
        company = watch.company.called_from(sys._getframe(1))
        saved = atomic.save(lambda folder: save_state(self, folder, *args, **kwargs), self, output_dir, company, watch.answering)
        watch.saved += 1
        watch.tell(root=str(Path(str(saved)).absolute().parent), checkpoint=Path(str(saved)).name)
        return saved

    @functools.wraps(load_state)
    def load(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = load_state(self, input_dir, *args, **kwargs)
        if not watch.idle:
            watch.loaded(input_dir, lead=self.is_main_process)
        return result

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        if not watch.idle and self.gradient_state.sync_gradients:
            watch.stepped(sys._getframe(1), self)
        return result

    setattr(save, _MARK, save_state)
    kind.save_state, kind.load_state, optimizer.step = save, load, stepped


class _StateSaves:
    """accelerator.save_state(): known by its name, since the accelerator may come from anywhere."""

    def is_save(self, call: ast.Call, target: object | None) -> bool:
        return isinstance(call.func, ast.Attribute) and call.func.attr == "save_state"

    def payload(self, call: ast.Call) -> None:
        return None


class Watch:
    """One a process. `idle`: there is nothing to be done here."""

    def __init__(self, jit: JITCheckpointConfig) -> None:
        self.idle = False
        self.saved = 0  # calls of save_state() that came to their end
        self._jit = jit
        self._pid = os.getpid()
        self._steps = 0
        self._began = time.monotonic()
        self._script: Script | None = None
        self._notice: Notice | None = None
        self._target: int | None = None  # the step to save at
        self._loaded: str | None = None  # what load_state() was given; empty: it looked by itself
        self._stays = ""  # why the same command would not go on from what is saved
        self._optimizer: Any = None
        self._budget = Budget(clocks.Clock())
        self._entering = False
        self._saved_before = 0
        self._through = False  # the branch was run
        self._lock = threading.Lock()
        self._guarded = Guarded(jit, self._on_signal, self._take)
        self._store: Store | None = None
        self.company = Company()
        self._membership: registry.Membership | None = None  # in what `lastcall run` knows of

    @property
    def answering(self) -> atomic.Answer | None:
        """What the save that is under way is made for."""
        return atomic.Answer(self._notice, not self._stays) if self._entering and self._notice is not None else None

    def tell(self, **changes: object) -> None:
        """Keep the launcher informed. A forked child is not this process, whatever it inherits."""
        if self._membership is not None and os.getpid() == self._pid:
            self._membership.update(**changes)

    # ---- the training thread ---------------------------------------------------------------------------------------------------

    def loaded(self, given: Any, *, lead: bool) -> None:
        """The script has gone on from a checkpoint."""
        self._loaded = "" if given is None else os.fspath(given)
        if self._loaded and lead:
            handover.taken(Path(os.path.abspath(os.path.expanduser(self._loaded))).parent)

    def stepped(self, frame: FrameType, optimizer: Any = None) -> None:
        """An optimizer step is complete, in this frame."""
        if self._steps == 0:
            self._optimizer = optimizer
            self._begin(frame)
        self._steps += 1
        target = self._target
        if target is not None and self._steps >= target and not self._entering:
            log.info("Step %d of this process is complete: the script's own save comes next", self._steps)
            self._saved_before = self.saved
            assert self._script is not None
            self._entering = self._script.enter(frame, self._leave, wait=self._store is None)  # False: from elsewhere

    def _begin(self, frame: FrameType) -> None:
        self._began = time.monotonic()
        if self._is_ours(frame):
            self.idle = True
            return
        try:
            self._guarded.begin()
        except errors.BusyError:  # protect() is at work
            self.idle = True
            return
        self._script = find(frame, _StateSaves())
        if not self._script.points:
            log.warning(
                "This script is not protected: %s. Save in the training loop under a condition on the step (if step %% 500 == 0: "
                "accelerator.save_state(...)), or use lastcall.protect(directory, accelerator=accelerator)",
                self._script.because,
            )
            self._end()
            if self._notice is not None:  # it came in this very moment
                exits.die_of(self._notice.signum or signal.SIGTERM)
            return
        kept = self._script.kept_from
        if kept:
            log.warning(
                "A notice will save nothing: %s keeps the script from its own save (%s). Give the option that switches it on "
                "(--checkpointing_steps, in Hugging Face's examples), or use lastcall.protect(directory, accelerator=accelerator)",
                kept, self._script.place,
            )  # fmt: skip
        else:
            log.info("A notice will run the script's own save: %s", self._script.place)
        self._look_back(frame)
        self._stays = resuming.why_not(frame, self._loaded, sys.argv[1:])
        if self._stays and not kept:
            log.warning(
                "A notice will be answered by the script's own save, but the same command would not go on from it: %s. The exit code "
                "will be the signal's own. Let the restart have the path: lastcall run --resume-args '--resume_from_checkpoint {path}' "
                "-- COMMAND",
                self._stays,
            )
        self._join()
        self._world = worlds.find(self._jit)
        if self._world.many:
            self._store = self._world.meet()
            self.company = Company(self._world.rank, self._world.size, self._store)
            threading.Thread(target=self._follow, args=(self._store.clone(),), name="lastcall-ranks", daemon=True).start()

    def _look_back(self, frame: FrameType) -> None:
        """What was saved for a restart, and this start has passed by."""
        if self._loaded is not None:
            return
        found = handover.waiting([Path(path).absolute() for path in resuming.folders(frame, sys.argv[1:])])
        if found is None:
            return
        step = f"step {found.record.step}, after {found.record.reason}" if found.record is not None else ""
        told = (
            f"{found.path} was saved for a restart ({step}), and this one has not loaded it: training has begun anew. To go on from "
            f"it: lastcall run --resume-args '--resume_from_checkpoint {{path}}' -- COMMAND, or give the script that path yourself"
        )
        if found.demands_a_resume(job_identity.identity(), time.time()):
            self._end()
            settings.fail(f"{told}. To train anew: move it away, or give the script another folder")
        log.warning("%s", told)

    def _join(self) -> None:
        """`lastcall run` must know whom to wait for, and how this process ends: what lies between turns every code into 1."""
        self._membership = registry.Membership.of_environment(Path.cwd())
        if self._membership is not None:
            self.tell(step=0)
            atexit.register(self._ended)
            threading.Thread(target=self._look, name="lastcall-launcher", daemon=True).start()

    def _ended(self) -> None:
        if not self.idle:
            failed = getattr(sys, "last_value", None) is not None
            self.tell(step=self._steps, outcome=(Outcome.FAILED if failed else Outcome.FINISHED).value)

    @staticmethod
    def _is_ours(frame: FrameType | None) -> bool:
        while frame is not None:
            if f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
                return True
            frame = frame.f_back
        return False

    def _end(self, *, ignore: bool = False) -> None:
        self.idle = True
        self._guarded.let_go(ignore=ignore)

    def _leave(self) -> None:
        """The frame has left the branch, or has found that it is not for this rank."""
        notice = self._notice
        assert notice is not None
        self._through = True
        done = self.saved > self._saved_before
        if self._store is not None:
            done = self._wait_for_the_others(self._store, notice, done)
        if not done:
            log.error("The script's own save did not call save_state(): nothing was saved")
            self.tell(step=self._steps, outcome=Outcome.NOT_SAVED.value)
            self._end()
            exits.die_of(notice.signum or signal.SIGTERM)
        log.info("JIT checkpoint completed in %.1fs, by the script's own save", time.monotonic() - notice.at)
        self.tell(step=self._steps, outcome=Outcome.SAVED.value, stays=self._stays)
        if self._stays:
            log.warning(
                "The run is saved, but the same command would not go on from it: %s. The exit code is the signal's own. Start it with: "
                "lastcall run --resume-args '--resume_from_checkpoint {path}' -- COMMAND",
                self._stays,
            )
        self._end(ignore=True)
        raise errors.Preempted(exits.code(notice, not self._stays, self._jit.exit_code), f"saved and stopped after {notice.reason}")

    def _wait_for_the_others(self, store: Store, notice: Notice, saved: bool) -> bool:
        """Nobody takes the process group away from a rank that is still writing. Returns whether any of them has saved: the script may
        let one rank do it for all."""
        saved_by: dict[int, bytes | None] = {self._world.rank: b"saved" if saved else b"not"}
        until = notice.deadline or time.monotonic() + self._jit.grace
        try:
            store.set(f"done/{self._world.rank}", saved_by[self._world.rank] or b"")
            saved_by |= self._hear_all(store, "done", until)
            # Rank 0's process holds the store: it leaves when the others have read what they need from it.
            store.set(f"read/{self._world.rank}", b"1")
            if self._world.rank == 0:
                self._hear_all(store, "read", min(until, time.monotonic() + _READING))
        except errors.StoreLost:
            log.debug("the store is gone: so is rank 0, which leaves when all are done, or was killed")
        return b"saved" in saved_by.values()

    def _hear_all(self, store: Store, what: str, until: float) -> dict[int, bytes | None]:
        keys = [f"{what}/{rank}" for rank in range(self._world.size)]
        while None in (words := store.get_many(keys)) and time.monotonic() < until:
            time.sleep(_POLL)
        return dict(enumerate(words))

    # ---- notices, on other threads ---------------------------------------------------------------------------------------------

    def _on_signal(self, signum: int, count: int) -> None:
        if count > 1 and signum == signal.SIGINT:
            exits.die_of(signum)
        now = time.monotonic()
        self._take(Notice("signal", signal.Signals(signum).name, now, now + self._jit.grace, signum))

    def _look(self) -> None:
        """What the launcher posts: a notice without a signal, or a deadline that no signal can bring."""
        assert self._membership is not None
        while not self.idle:
            if (notice := self._membership.notice()) is not None:
                self._take(dataclasses.replace(notice, deadline=notice.deadline or notice.at + self._jit.grace))
            time.sleep(_LOOK)

    def _take(self, notice: Notice) -> None:
        with self._lock:
            if self._notice is not None:
                assert self._notice.deadline is not None and notice.deadline is not None
                self._notice = dataclasses.replace(self._notice, deadline=min(self._notice.deadline, notice.deadline))
                return
            self._notice = notice
        log.info("%s received, initiating JIT checkpoint in %.1fs", self._notice.reason, self._kill_wait())
        threading.Thread(target=self._serve, name="lastcall-notice", daemon=True).start()

    def _kill_wait(self) -> float:
        """The rule of all adapters. A second notice may have shortened the deadline since."""
        notice = self._notice
        assert notice is not None
        return self._budget.kill_wait(self._jit.kill_wait, _bytes_of(self._optimizer), notice.deadline)

    def _serve(self) -> None:
        notice = self._notice
        assert notice is not None
        while (left := min(notice.at + self._jit.kill_wait, time.monotonic() + self._kill_wait()) - time.monotonic()) > 0:
            time.sleep(min(left, _POLL))
        if self._store is None:
            self._target = self._steps + 1
        else:
            usual = (time.monotonic() - self._began) / max(1, self._steps)
            word = f"{self._steps + 2 + int(_MARGIN / max(usual, 1e-3))} {notice.reason}"
            with_store = self._store.clone()
            self._hear(with_store.claim("target", word.encode()))
        while (notice := self._notice or notice).deadline is not None and time.monotonic() < notice.deadline - 0.5:
            time.sleep(_POLL)
        if not self.idle and not self._through:
            log.error("The training loop did not come to its own save in time: nothing was saved")
            self.tell(step=self._steps, outcome=Outcome.NOT_SAVED.value)
            exits.die_of(notice.signum or signal.SIGTERM)

    def _follow(self, store: Store) -> None:
        """What another rank has said."""
        try:
            while not self.idle and self._target is None:
                word = store.get("target", 1.0)
                if word is not None:
                    self._hear(word)
        except errors.StoreLost:
            log.debug("the store is gone: so are the others")

    def _hear(self, word: bytes) -> None:
        step, _, reason = word.decode().partition(" ")
        if self._notice is None:
            now = time.monotonic()
            self._notice = Notice("ranks", reason, now, now + self._jit.grace)
            log.info("Another rank was told to stop (%s): this one saves at step %s of the process, too", reason, step)
        self._target = int(step)


def _bytes_of(optimizer: Any) -> int:
    """What a save has to write, about: the parameters, and what the optimizer keeps of each."""
    inner = getattr(optimizer, "optimizer", optimizer)
    kept = [
        value for state in dict(getattr(inner, "state", {})).values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    held = [value for group in getattr(inner, "param_groups", ()) for value in group["params"]]
    return sum(value.numel() * value.element_size() for value in (*kept, *held))
