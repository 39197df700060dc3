"""Scripts with an Accelerator that do not use lastcall: a notice makes them take their own save branch, and
leave.

    if step % 500 == 0:
        accelerator.save_state(f"{out}/step_{step}")

Three methods of Accelerate are wrapped: every completed optimizer step, save_state() and load_state() call a
WatchedScript. Under a Trainer or protect(), which have better ways, it does nothing.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lastcall.adapters.accelerate import atomic
from lastcall.adapters.accelerate.watched_script import WatchedScript
from lastcall.settings import JITCheckpointConfig

_MARK = "_lastcall_original"


def protect_all(module: ModuleType) -> None:
    """For accelerate.accelerator, from the bootstrap."""
    jit = JITCheckpointConfig()
    kind, optimizer = module.Accelerator, module.AcceleratedOptimizer
    if not jit.enabled or hasattr(kind.save_state, _MARK):
        return
    script = WatchedScript(jit)
    save_state, load_state, step = kind.save_state, kind.load_state, optimizer.step

    @functools.wraps(save_state)
    def save(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if script.idle:
            return save_state(self, output_dir, *args, **kwargs)
        participants = script.participants.called_from(sys._getframe(1))
        occasion = script.begin_save()
        saved = atomic.save(
            lambda folder: save_state(self, folder, *args, **kwargs),
            self,
            output_dir,
            participants,
            occasion,
        )
        script.end_save(Path(str(saved)).absolute())
        return saved

    @functools.wraps(load_state)
    def load(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = load_state(self, input_dir, *args, **kwargs)
        if not script.idle:
            script.loaded(input_dir, main_process=self.is_main_process)
        return result

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        if not script.idle and self.gradient_state.sync_gradients:
            script.stepped(sys._getframe(1), self)
        return result

    setattr(save, _MARK, save_state)
    kind.save_state, kind.load_state, optimizer.step = save, load, stepped
