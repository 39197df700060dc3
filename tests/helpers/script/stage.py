"""Runs a training script that knows nothing of us, with a real optimizer and a `train` that stands for Ray's,
and tells it to stop."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lastcall import script as scripts

BATCHES = 4
EPOCHS = 6


class Stopped(BaseException):
    """In place of a training thread that is parked for good."""


class Reports:
    def is_save(self, call: ast.Call, target: object | None) -> bool:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        given = self.payload(call)
        return (
            name == "report"
            and given is not None
            and not (isinstance(given, ast.Constant) and given.value is None)
        )

    def payload(self, call: ast.Call) -> ast.expr | None:
        if len(call.args) > 1:
            return call.args[1]
        return next((word.value for word in call.keywords if word.arg in ("checkpoint", None)), None)


class Checkpoint:
    """Holds what was in the folder when it was reported."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def from_directory(cls, path: str) -> Checkpoint:
        return cls(path)

    def as_directory(self) -> Any:
        return contextlib.nullcontext(self.path)


class Stage:
    """One incarnation of a script. `seen` is what it trained on: (epoch, batch), or a step."""

    def __init__(
        self,
        folder: Path,
        source: str,
        *,
        rank: int = 0,
        at: int | None = None,
        act: Callable[[Stage, FrameType], None] | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        self.seen: list[Any] = []
        self.reports: list[tuple[dict[str, Any], Path | None]] = []
        self.script: scripts.Script | None = None
        self.steps = 0
        self.because = ""
        self.saved: Path | None = None  # after the notice
        self.after = 0
        self.trace: Any = None  # a trace function of somebody else's, before the run, and after it
        self._told = False
        self._at, self._act = at, act
        self._folder = folder
        self._from = checkpoint
        self._path = folder / "script.py"
        self._path.write_text(textwrap.dedent(source))
        self._script = self._module(rank)

    def _module(self, rank: int) -> ModuleType:
        context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 2)
        api = SimpleNamespace(
            report=self._report,
            get_checkpoint=lambda: Checkpoint(str(self._from)) if self._from is not None else None,
            get_context=lambda: context,
            Checkpoint=Checkpoint,
        )
        modules = (contextlib, dataclasses, functools, json, os, tempfile, time, torch)
        script = ModuleType("script")
        vars(script).update({module.__name__: module for module in modules})
        vars(script).update(
            train=api, Checkpoint=Checkpoint, make=self._make, seen=self.seen.append, EPOCHS=EPOCHS
        )
        vars(script).update(LOADER=[torch.full((2, 3), float(batch)) for batch in range(BATCHES)])
        return script

    def _make(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        return self.model, self.optimizer

    def run(self) -> Stage:
        return self.run_code(compile(self._path.read_text(), str(self._path), "exec"))

    def run_code(self, code: CodeType) -> Stage:
        """In a thread, as Ray does it: nothing of whoever runs the tests is among the frames of the
        script."""
        with ThreadPoolExecutor(1) as training:
            return training.submit(self._run_here, code).result()

    def _run_here(self, code: CodeType) -> Stage:
        sys.settrace(self.trace)
        sys.modules["script"] = self._script  # dataclasses look there
        hook = register_optimizer_step_post_hook(self._stepped)
        try:
            exec(code, vars(self._script))
            if hasattr(self._script, "main"):
                self._script.main({"epochs": EPOCHS, "every": 1000})
        except Stopped:
            pass
        finally:
            hook.remove()
            del sys.modules["script"]
            if self.script is not None:
                self.script.cancel()
            self.trace = sys.gettrace()
        return self

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.steps += 1
        frame = sys._getframe(1)
        if self.script is None:
            self.script = scripts.find(frame, Reports())
        if self.steps == self._at and self._act is not None:
            self._told = True
            self._act(self, frame)

    def _report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
        if self.script is not None:
            self.script.remember(sys._getframe(1))
        kept: Path | None = None
        if checkpoint is not None:
            kept = self._folder / f"checkpoint-{time.monotonic_ns()}"
            os.makedirs(kept)
            for name in os.listdir(checkpoint.path):
                (kept / name).write_bytes((Path(checkpoint.path) / name).read_bytes())
        self.reports.append((metrics, kept))
        if self._told and (kept is not None or (self.script is not None and self.script.inside)):
            self.saved = kept
            raise Stopped

    def left(self) -> None:
        self.after += 1
        raise Stopped


def enter(stage: Stage, frame: FrameType) -> None:
    assert stage.script is not None
    if stage.script.points:
        assert stage.script.enter(frame, stage.left, wait=False)


def replay(stage: Stage, frame: FrameType) -> None:
    assert stage.script is not None
    stage.because = stage.script.replay(frame)
    raise Stopped
