"""Scripts with an Accelerator that know nothing of lastcall: a notice makes them take their own save branch, and leave.

    if step % 500 == 0:
        accelerator.save_state(f"{out}/step_{step}")

At the first completed optimizer step the branch is looked for in the source of the frames that led there. From then on signals are
listened to. After a notice, at a completed step (with many ranks: at one that all have agreed on), the branch is entered as though its
condition were true; when the frame has left its body, the process leaves with the code for "saved". The script resumes as it always
has. A Trainer and protect() have better ways: under them nothing is done here.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType, ModuleType
from typing import Any

from lastcall import errors
from lastcall.adapters.accelerate import atomic
from lastcall.adapters.torch import world as worlds
from lastcall.adapters.torch.protection import Guarded
from lastcall.adapters.torch.script import branches
from lastcall.adapters.torch.script.entering import Entering
from lastcall.core import exits
from lastcall.core.store import Store
from lastcall.settings import JITCheckpointConfig
from lastcall.types import Notice

log = logging.getLogger("lastcall")
_MARK = "_lastcall_original"
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
    save_state, step = kind.save_state, optimizer.step

    @functools.wraps(save_state)
    def save(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if watch.idle:
            return save_state(self, output_dir, *args, **kwargs)
        saved = atomic.save(save_state, self, output_dir, *args, **kwargs)
        watch.saved += 1
        return saved

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        if not watch.idle and self.gradient_state.sync_gradients:
            watch.stepped(sys._getframe(1))
        return result

    setattr(save, _MARK, save_state)
    kind.save_state, optimizer.step = save, stepped


class Watch:
    """One a process. `idle`: there is nothing to be done here."""

    def __init__(self, jit: JITCheckpointConfig) -> None:
        self.idle = False
        self.saved = 0  # calls of save_state() that came to their end
        self._jit = jit
        self._pid = os.getpid()
        self._steps = 0
        self._began = time.monotonic()
        self._branches: list[branches.Branch] = []
        self._notice: Notice | None = None
        self._target: int | None = None  # the step to save at
        self._entering: Entering | None = None
        self._saved_before = 0
        self._through = False  # the branch was run
        self._guarded = Guarded(jit, self._on_signal)
        self._store: Store | None = None

    # ---- the training thread ---------------------------------------------------------------------------------------------------

    def stepped(self, frame: FrameType) -> None:
        """An optimizer step is complete, in this frame."""
        if self._steps == 0:
            self._begin(frame)
        self._steps += 1
        target = self._target
        if target is not None and self._steps >= target and self._entering is None:
            log.info("Step %d of this process is complete: the script's own save comes next", self._steps)
            self._saved_before = self.saved
            self._entering = Entering(self._branches, self._leave, wait=self._store is None)
            if not self._entering.begin(frame):
                self._entering = None  # called from elsewhere this time

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
        self._branches, because = branches.find(frame)
        if not self._branches:
            log.warning(
                "This script is not protected: %s. Save in the training loop under a condition on the step (if step %% 500 == 0: "
                "accelerator.save_state(...)), or use lastcall.protect(directory, accelerator=accelerator)",
                because,
            )
            self._end()
            if self._notice is not None:  # it came in this very moment
                exits.die_of(self._notice.signum or signal.SIGTERM)
            return
        log.info("A notice will run the script's own save: %s", " or ".join(branch.place for branch in self._branches))
        self._world = worlds.find(self._jit)
        if self._world.many:
            self._store = self._world.meet()
            threading.Thread(target=self._follow, args=(self._store.clone(),), name="lastcall-ranks", daemon=True).start()

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
            self._end()
            exits.die_of(notice.signum or signal.SIGTERM)
        log.info("JIT checkpoint completed in %.1fs, by the script's own save", time.monotonic() - notice.at)
        self._end(ignore=True)
        raise errors.Preempted(exits.code(notice, True, self._jit.exit_code), f"saved and stopped after {notice.reason}")

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
        if self._notice is not None:
            return
        now = time.monotonic()
        self._notice = Notice("signal", signal.Signals(signum).name, now, now + self._jit.grace, signum)
        wait = max(0.0, min(self._jit.kill_wait, self._jit.grace / 3))
        log.info("%s received, initiating JIT checkpoint in %.1fs", self._notice.reason, wait)
        threading.Thread(target=self._serve, args=(self._notice, wait), name="lastcall-notice", daemon=True).start()

    def _serve(self, notice: Notice, wait: float) -> None:
        time.sleep(wait)
        if self._store is None:
            self._target = self._steps + 1
        else:
            usual = (time.monotonic() - self._began) / max(1, self._steps)
            word = f"{self._steps + 2 + int(_MARGIN / max(usual, 1e-3))} {notice.reason}"
            with_store = self._store.clone()
            self._hear(with_store.claim("target", word.encode()))
        assert notice.deadline is not None
        time.sleep(max(0.0, notice.deadline - time.monotonic() - 0.5))
        if not self.idle and not self._through:
            log.error("The training loop did not come to its own save in time: nothing was saved")
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
