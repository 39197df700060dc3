"""Scripts with an Accelerator that know nothing of lastcall: a notice makes them take their own save branch,
and leave.

    if step % 500 == 0:
        accelerator.save_state(f"{out}/step_{step}")

At the first completed optimizer step the branch is looked for in the source of the frames that led there.
From then on signals are listened to. After a notice, at a completed step (with many ranks: at one that all
have agreed on), the branch is entered as though its condition were true; when the frame has left its body,
the process leaves with the code for "saved". The script resumes as it always has. A Trainer and protect()
have better ways: under them nothing is done here.
"""

from __future__ import annotations

import ast
import atexit
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from lastcall import errors, settings
from lastcall.adapters.accelerate import atomic, resuming
from lastcall.adapters.accelerate.company import Company
from lastcall.adapters.accelerate.script_save import ScriptSave
from lastcall.adapters.torch import world as worlds
from lastcall.core import timing
from lastcall.core.checkpoint import handover
from lastcall.core.checkpoint.catalog import PRIVATE
from lastcall.core.context import NoticeContext
from lastcall.core.notice.answer import Answer
from lastcall.core.notice.launcher_link import LauncherLink
from lastcall.core.notice.phases import Phases
from lastcall.core.notice.responder import Responder
from lastcall.core.process import exits, job_identity
from lastcall.core.ranks.agreement import Agreement
from lastcall.script import Script, find
from lastcall.settings import JITCheckpointConfig
from lastcall.shield.listening import Guarded
from lastcall.types import Notice, Outcome

log = logging.getLogger("lastcall")
_MARK = "_lastcall_original"
_OURS = ("transformers.", "lastcall.")
_NOWHERE = Path(os.devnull) / PRIVATE  # what is beside a script's checkpoints may be taken for one of them


def protect_all(module: ModuleType) -> None:
    """For accelerate.accelerator, from the bootstrap."""
    jit = JITCheckpointConfig()
    kind, optimizer = module.Accelerator, module.AcceleratedOptimizer
    if not jit.enabled or hasattr(kind.save_state, _MARK):
        return
    watch = WatchedScript(jit)
    save_state, load_state, step = kind.save_state, kind.load_state, optimizer.step

    @functools.wraps(save_state)
    def save(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if watch.idle:
            return save_state(self, output_dir, *args, **kwargs)
        company = watch.company.called_from(sys._getframe(1))
        watch.saving()
        saved = atomic.save(
            lambda folder: save_state(self, folder, *args, **kwargs),
            self,
            output_dir,
            company,
            watch.occasion,
        )
        watch.has_saved(Path(str(saved)).absolute())
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


class WatchedScript:
    """One a process. `idle`: there is nothing to be done here."""

    def __init__(self, jit: JITCheckpointConfig) -> None:
        self.idle = False
        self.saved = 0  # calls of save_state() that came to their end
        self.company = Company()
        self._jit = jit
        self._began = False
        self._script: Script | None = None
        self._loaded: str | None = None  # what load_state() was given; empty: it looked by itself
        self._stays = ""  # why the same command would not go on from what is saved
        self._optimizer: Any = None
        self._entering = False
        self._saved_before = 0
        self._writes = False  # there is a place for events and progress
        self._link: LauncherLink | None = None
        private = _NOWHERE if jit.directory is None else Path(jit.directory).absolute() / PRIVATE
        self._context = NoticeContext.beside(private, jit, _rank())
        self._phases = Phases(self._context.events.emit)
        self._answer = Answer(self._context, self._phases, self._last_words)
        self._save = ScriptSave(self._context, self._answer, lambda: _bytes_of(self._optimizer), self._die)
        self._responder = Responder(self._context, self._answer, self._save, self._look)
        self._guarded = Guarded(jit, self._on_signal, self._take)

    @property
    def occasion(self) -> atomic.Occasion | None:
        """What the save that is under way is made for."""
        notice = self._context.latch.notice
        return atomic.Occasion(notice, not self._stays) if self._entering and notice is not None else None

    def tell(self, **changes: object) -> None:
        """Keep the launcher informed."""
        if self._link is not None:
            self._link.tell(**changes)

    # ---- the training thread -------------------------------------------------------------------------------

    def loaded(self, given: Any, *, lead: bool) -> None:
        """The script has gone on from a checkpoint."""
        self._loaded = "" if given is None else os.fspath(given)
        if self._loaded and lead:
            handover.taken(Path(os.path.abspath(os.path.expanduser(self._loaded))).parent)

    def saving(self) -> None:
        """save_state() is called."""
        if self._entering:
            self._save.begin()

    def has_saved(self, path: Path) -> None:
        """save_state() came to its end."""
        self.saved += 1
        self.tell(root=str(path.parent), checkpoint=path.name)
        if self._entering:
            self._save.committed(path.name, atomic.NOT_EXACT)

    def stepped(self, frame: FrameType, optimizer: Any = None) -> None:
        """An optimizer step is complete, in this frame."""
        if not self._began:
            self._optimizer = optimizer
            self._begin(frame)
        save = self._save
        save.steps += 1
        if not self._entering and save.due():
            log.info("Step %d of this process is complete: the script's own save comes next", save.steps)
            self._saved_before = self.saved
            assert self._script is not None
            # False: from elsewhere
            self._entering = self._script.enter(frame, self._leave, wait=not save.many)

    def _begin(self, frame: FrameType) -> None:
        self._began = True
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
                "This script is not protected: %s. Save in the training loop under a condition on the step "
                "(if step %% 500 == 0: "
                "accelerator.save_state(...)), or use lastcall.protect(directory, accelerator=accelerator)",
                self._script.because,
            )
            self._end()
            if self._context.latch.raised:  # it came in this very moment
                exits.die_of(self._signum)
            return
        kept = self._script.kept_from
        if kept:
            log.warning(
                "A notice will save nothing: %s keeps the script from its own save (%s). Give the option "
                "that switches it on "
                "(--checkpointing_steps, in Hugging Face's examples), or use lastcall.protect(directory, "
                "accelerator=accelerator)",
                kept,
                self._script.place,
            )
        else:
            log.info("A notice will run the script's own save: %s", self._script.place)
        self._look_back(frame)
        self._stays = resuming.why_not(frame, self._loaded, sys.argv[1:])
        if self._stays and not kept:
            log.warning(
                "A notice will be answered by the script's own save, but the same command would not go on "
                "from it: %s. The exit code "
                "will be the signal's own. Let the restart have the path: lastcall run --resume-args "
                "'--resume_from_checkpoint {path}' "
                "-- COMMAND",
                self._stays,
            )
        self._writes = self._jit.directory is not None and not resuming.works_with(
            self._jit.directory, frame, sys.argv[1:]
        )
        self._join()

    def _look_back(self, frame: FrameType) -> None:
        """What was saved for a restart, and this start has passed by."""
        if self._loaded is not None:
            return
        found = handover.waiting([Path(path).absolute() for path in resuming.folders(frame, sys.argv[1:])])
        if found is None:
            return
        step = f"step {found.record.step}, after {found.record.reason}" if found.record is not None else ""
        told = (
            f"{found.path} was saved for a restart ({step}), and this one has not loaded it: training has "
            "begun anew. To go on from "
            f"it: lastcall run --resume-args '--resume_from_checkpoint {{path}}' -- COMMAND, or give the "
            "script that path yourself"
        )
        if found.demands_a_resume(job_identity.identity(), time.time()):
            self._end()
            settings.fail(f"{told}. To train anew: move it away, or give the script another folder")
        log.warning("%s", told)

    def _join(self) -> None:
        """`lastcall run` must know whom to wait for, and how this process ends: what lies between turns every
        code into 1."""
        self._link = LauncherLink(Path.cwd(), _NOWHERE, self._context.clock, self._jit.grace)
        self.tell(step=0)
        atexit.register(self._ended, os.getpid())
        world = worlds.find(self._jit)
        if world.many:
            store = world.meet()
            self.company = Company(world.rank, world.size, store)
            ranks = Agreement(store, world.rank, world.size, self._context.clock)
            self._save.join(ranks)
            _start(functools.partial(self._save.listen, ranks.clone(), self._take), "ranks")
        self._context.events.emit("start", resumed=Path(self._loaded).name if self._loaded else None)
        self._context.progress.where = lambda: self._save.steps
        _start(self._write_down, "events")
        _start(self._attend, "agent")

    def _ended(self, pid: int) -> None:
        """The interpreter exits. A forked child is not this process, whatever it inherits."""
        if self.idle or os.getpid() != pid:
            return
        failed = getattr(sys, "last_value", None) is not None
        self._context.outcome.decide(Outcome.FAILED if failed else Outcome.FINISHED)
        self._phases.close()
        self._last_words()

    @staticmethod
    def _is_ours(frame: FrameType | None) -> bool:
        while frame is not None:
            if f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
                return True
            frame = frame.f_back
        return False

    def _end(self, *, ignore: bool = False) -> None:
        self.idle = True
        self._phases.close()
        self._guarded.let_go(ignore=ignore)

    def _leave(self) -> None:
        """The frame has left the branch, or has found that it is not for this rank."""
        notice = self._context.latch.notice
        assert notice is not None
        if not self._save.left(self.saved > self._saved_before):
            self._end()
            self._die()
        log.info(
            "JIT checkpoint completed in %.1fs, by the script's own save",
            self._context.clock.now() - notice.at,
        )
        code = exits.code(notice, not self._stays, self._jit.exit_code)
        exits.see_out(code, self._answer.deadline)
        self._last_words()
        if self._stays:
            log.warning(
                "The run is saved, but the same command would not go on from it: %s. The exit code is the "
                "signal's own. Start it with: "
                "lastcall run --resume-args '--resume_from_checkpoint {path}' -- COMMAND",
                self._stays,
            )
        self._end(ignore=True)
        raise errors.Preempted(code, f"saved and stopped after {notice.reason}")

    def _last_words(self) -> None:
        """To the launcher, and to who reads the events."""
        context, outcome = self._context, self._context.outcome
        self.tell(
            step=self._save.steps, outcome=outcome.text, **({"stays": self._stays} if outcome.saved else {})
        )
        context.events.emit("stop", outcome=outcome.text, step=self._save.steps)
        if self._writes:
            context.events.close()
            context.progress.flush()

    def _die(self) -> None:
        """Nothing is saved."""
        self._last_words()
        exits.die_of(self._signum)

    @property
    def _signum(self) -> int:
        notice = self._context.latch.notice
        return signal.SIGTERM if notice is None or notice.signum is None else notice.signum

    # ---- notices, on other threads -------------------------------------------------------------------------

    def _on_signal(self, signum: int, count: int) -> None:
        if count > 1 and signum == signal.SIGINT:
            exits.die_of(signum)
        now = self._context.clock.now()
        self._take(Notice("signal", signal.Signals(signum).name, now, now + self._jit.grace, signum))

    def _look(self) -> None:
        """What comes as a file: a notice without a signal, or a deadline that no signal can bring."""
        assert self._link is not None
        try:
            notice = self._link.notice()
        except Exception:  # the agent must not stop looking
            log.exception("A fault in lastcall: it goes on listening")
            return
        if notice is not None:
            self._take(notice)

    def _take(self, notice: Notice) -> None:
        context = self._context
        if context.latch.offer(notice):
            left = None if notice.deadline is None else round(notice.deadline - context.clock.now(), 3)
            context.events.emit(
                "notice", source=notice.source, reason=notice.reason, deadline_in=left, step=self._save.steps
            )

    def _attend(self) -> None:
        """The agent: sleeps until there is a notice, and has it answered."""
        latch = self._context.latch
        while not latch.wait(timing.LOOK):
            if self._phases.closed:
                return
            self._look()
        assert latch.notice is not None
        try:
            self._responder.run(latch.notice)
        except Exception:
            log.exception("A fault in lastcall: the next step does what it can")
            self._responder.fault()

    def _write_down(self) -> None:
        """On a thread of its own: a dead network disk may hold it up for long. Into LASTCALL_DIRECTORY, if
        the script leaves that to us."""
        while not self._phases.wait_closed(1.0):
            self.tell(step=self._save.steps)
            if self._writes:
                self._context.events.flush()
                self._context.progress.flush()


def _start(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=f"lastcall-{name}", daemon=True).start()


def _rank() -> int:
    """For the names of files alone."""
    told = settings.of_torchrun()
    return int(told["RANK"]) if told is not None else 0


def _bytes_of(optimizer: Any) -> int:
    """What a save has to write, about: the parameters, and what the optimizer keeps of each."""
    inner = getattr(optimizer, "optimizer", optimizer)
    kept = [
        value
        for state in dict(getattr(inner, "state", {})).values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    held = [value for group in getattr(inner, "param_groups", ()) for value in group["params"]]
    return sum(value.numel() * value.element_size() for value in (*kept, *held))
