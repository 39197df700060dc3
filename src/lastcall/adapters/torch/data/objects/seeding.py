"""Samplers and streams that seed a generator of their own with the time or the process: no pass of them can
be made again.

Found while a pass begins and makes its first batch: which lines ask for the time, for the process or for the
system's random numbers, and make a generator or a seed of that. Those lines only: what else asks for the time
is not looked at.
"""

from __future__ import annotations

import dis
import os
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lastcall.core.checkpoint.doubts import Doubts

_ASKED = frozenset({time.time, time.time_ns, time.perf_counter, os.getpid, os.urandom})
_SEEDED = frozenset(
    {"Random", "RandomState", "default_rng", "SeedSequence", "Generator", "manual_seed", "seed"}
)


class Watch:
    def __init__(self) -> None:
        self._lines: dict[tuple[types.CodeType, int], None] = {}

    def begin(self) -> None:
        """One that a worker has inherited from the process that it was forked from is put aside."""
        now = sys.getprofile()
        if now is None or getattr(now, "__func__", None) is Watch._event:
            sys.setprofile(self._event)

    def end(self, loader: str, doubts: Doubts) -> None:
        if sys.getprofile() == self._event:
            sys.setprofile(None)
        for code, line in self._lines:
            if _seeds(code, line):
                doubts.add(
                    f"`{code.co_qualname}` ({os.path.basename(code.co_filename)}:{line}) seeds the order of "
                    f"`{loader}` with the time "
                    "or the process, so that an interrupted pass cannot be made again",
                    "Give it a seed, or a generator that is seeded.",
                )
        self._lines = {}

    def _event(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called in _ASKED:
            self._lines[frame.f_code, frame.f_lineno] = None


@contextmanager
def watched(loader: str, doubts: Doubts) -> Iterator[None]:
    """While a pass begins. What is only judged, without gradients, may come in any order."""
    watch = Watch()
    if torch.is_grad_enabled():
        watch.begin()
    try:
        yield
    finally:
        watch.end(loader, doubts)


def _seeds(code: types.CodeType, line: int) -> bool:
    """Whether the call that stands on this line, or the ones around it, make a generator or a seed."""
    steps = [(step, *_lines(step)) for step in dis.get_instructions(code)]
    around = [
        (first, last)
        for step, first, last in steps
        if step.opname.startswith("CALL") and first <= line <= last
    ]
    begin, end = (
        min((first for first, _ in around), default=line),
        max((last for _, last in around), default=line),
    )
    here = [step for step, first, _ in steps if begin <= first <= end]
    loaded = {str(step.argval) for step in here if step.opname.startswith("LOAD")}
    stored = {str(step.argval) for step in here if step.opname.startswith("STORE")}
    return bool(loaded & _SEEDED) or any("seed" in name or "rng" in name for name in stored)


def _lines(step: dis.Instruction) -> tuple[int, int]:
    place = step.positions
    first = -1 if place is None or place.lineno is None else place.lineno
    return first, first if place is None or place.end_lineno is None else place.end_lineno
