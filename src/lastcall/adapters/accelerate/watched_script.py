"""A script whose own save_state() answers a notice.

At the first completed optimizer step, lastcall looks for the branch that saves in the source of the frames
that led there. From then on it listens to signals. After a notice, at a completed step (with many ranks: at
one that all have agreed on), the script enters the branch as though its condition were true; when the frame
has left its body, the process leaves with the code for "saved". The script resumes as it always has.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lastcall import errors, settings
from lastcall.adapters.accelerate import atomic, resuming
from lastcall.adapters.accelerate.participants import Participants
from lastcall.adapters.accelerate.script_session import ScriptSession
from lastcall.core.checkpoint import handover
from lastcall.core.checkpoint.catalog import PRIVATE
from lastcall.core.process import exits, job_identity
from lastcall.script import Script, find
from lastcall.settings import JITCheckpointConfig

log = logging.getLogger("lastcall")
_OURS = ("transformers.", "lastcall.")


class _StateSaves:
    """accelerator.save_state(): known by its name, since the accelerator may come from anywhere."""

    def is_save(self, call: ast.Call, target: object | None) -> bool:
        return isinstance(call.func, ast.Attribute) and call.func.attr == "save_state"

    def payload(self, call: ast.Call) -> None:
        return None


class WatchedScript:
    """One a process. `idle`: lastcall has nothing to do here."""

    def __init__(self, jit: JITCheckpointConfig) -> None:
        self.idle = False
        self.participants = Participants()
        self._jit = jit
        self._session: ScriptSession | None = None  # from the first completed step on
        self._script: Script | None = None
        self._loaded: str | None = None  # the argument of load_state(); empty: it found the folder itself
        self._entering = False
        self._saves = 0  # calls of save_state() that have returned
        self._saves_before = 0

    # ---- called by the wrapped methods ---------------------------------------------------------------------

    def loaded(self, given: Any, *, main_process: bool) -> None:
        """load_state() has returned."""
        self._loaded = "" if given is None else os.fspath(given)
        if self._loaded and main_process:
            handover.taken(Path(os.path.abspath(os.path.expanduser(self._loaded))).parent)

    def begin_save(self) -> atomic.Occasion | None:
        """save_state() is called. Returns the notice that it answers, if it does."""
        return self._session.begin_save() if self._session is not None and self._entering else None

    def end_save(self, path: Path) -> None:
        """save_state() has returned."""
        self._saves += 1
        if self._session is not None:
            self._session.end_save(path, answers=self._entering)

    def stepped(self, frame: FrameType, optimizer: Any = None) -> None:
        """An optimizer step is complete, in this frame."""
        session = self._session or self._begin(frame, optimizer)
        if session is None:
            return
        save = session.save
        save.steps += 1
        if not self._entering and save.due():
            log.info("Step %d of this process is complete: the script's own save comes next", save.steps)
            self._saves_before = self._saves
            assert self._script is not None
            # False: the branch is entered from another frame
            self._entering = self._script.enter(frame, self._leave, wait=not save.many)

    # ---- the first step ------------------------------------------------------------------------------------

    def _begin(self, frame: FrameType, optimizer: Any) -> ScriptSession | None:
        if _is_ours(frame):
            self.idle = True
            return None
        session = ScriptSession(self._jit, self._private(frame), lambda: _bytes_of(optimizer))
        try:
            session.listen()
        except errors.BusyError:  # protect() protects this process
            self.idle = True
            return None
        self._session = session
        self._script = find(frame, _StateSaves())
        if not self._script.points:
            log.warning(
                "This script is not protected: %s. Save in the training loop under a condition on the step "
                "(if step %% 500 == 0: accelerator.save_state(...)), or use lastcall.protect(directory, "
                "accelerator=accelerator)",
                self._script.because,
            )
            self._end()
            if session.notified:  # in this very moment
                exits.die_of(session.signum)
            return None
        kept = self._script.kept_from
        if kept:
            log.warning(
                "A notice will save nothing: %s keeps the script from its own save (%s). Give the option "
                "that switches it on (--checkpointing_steps, in Hugging Face's examples), or use "
                "lastcall.protect(directory, accelerator=accelerator)",
                kept,
                self._script.place,
            )
        else:
            log.info("A notice will run the script's own save: %s", self._script.place)
        self._look_for_newer(frame)
        session.why_not = resuming.why_not(frame, self._loaded, sys.argv[1:])
        if session.why_not and not kept:
            log.warning(
                "The script's own save will answer a notice, but the same command would not resume from it: "
                "%s. The exit code will be the signal's own. Have the restart receive the path: lastcall run "
                "--resume-args '--resume_from_checkpoint {path}' -- COMMAND",
                session.why_not,
            )
        self.participants = session.start(Path(self._loaded).name if self._loaded else None)
        return session

    def _private(self, frame: FrameType) -> Path | None:
        """The folder for events and progress. Not one of the script's: it may take whatever is beside its
        checkpoints for one of them."""
        folder = self._jit.directory
        if folder is None or resuming.works_with(folder, frame, sys.argv[1:]):
            return None
        return Path(folder).absolute() / PRIVATE

    def _look_for_newer(self, frame: FrameType) -> None:
        """A checkpoint that was saved for a restart, and that this start has not loaded."""
        if self._loaded is not None:
            return
        folders = [Path(path).absolute() for path in resuming.folders(frame, sys.argv[1:])]
        found = handover.waiting(folders)
        if found is None:
            return
        step = f"step {found.record.step}, after {found.record.reason}" if found.record is not None else ""
        message = (
            f"{found.path} was saved for a restart ({step}), and this start has not loaded it: training "
            "began from scratch. To resume from it: lastcall run --resume-args '--resume_from_checkpoint "
            "{path}' -- COMMAND, or pass that path to the script"
        )
        if found.demands_a_resume(job_identity.identity(), time.time()):
            self._end()
            settings.fail(f"{message}. To train from scratch: move it, or give the script another folder")
        log.warning("%s", message)

    # ---- the end -------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The frame has left the branch, or the branch is not for this rank."""
        session = self._session
        assert session is not None
        if not session.conclude(self._saves > self._saves_before):
            self._end()
            session.die()
        preempted = session.preempted()
        self._end(ignore=True)
        raise preempted

    def _end(self, *, ignore: bool = False) -> None:
        self.idle = True
        if self._session is not None:
            self._session.let_go(ignore=ignore)


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a Trainer or a Run of lastcall takes this step."""
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _bytes_of(optimizer: Any) -> int:
    """About what a save has to write: the parameters, and what the optimizer keeps of each."""
    inner = getattr(optimizer, "optimizer", optimizer)
    kept = [
        value
        for state in dict(getattr(inner, "state", {})).values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    held = [value for group in getattr(inner, "param_groups", ()) for value in group["params"]]
    return sum(value.numel() * value.element_size() for value in (*kept, *held))
