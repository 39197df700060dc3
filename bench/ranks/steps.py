"""What a step costs more with many ranks, while nothing happens: blocks of steps in pairs, as in bench.step,
on every rank at once.

`ddp`: steps of DistributedDataParallel, bare, protected, and with what others add to a step in order to agree
on a notice. Protected and bare blocks train models of their own with the same shapes: torch's hooks can be
set aside for a bare block, those of the mail cannot. `small`: a step that is nothing but the call of a very
small optimizer, without a collective, so that microseconds show."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench import ours, step
from bench.ranks import rays

_WIDTH, _LAYERS, _BATCH = 256, 4, 32
_BLOCK = 10
_WARM_UP = 20
Times = dict[str, list[float]]


class _Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self._batch = torch.randn(_BATCH, _WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()


class _Ledger:
    """What the copies at boundaries and the mail take, by the clock: they are too small a part of the time to
    be seen in a difference."""

    def __init__(self, session: ours.Steps) -> None:
        self._subject: Any = session.run._subject
        self._refresh = self._subject.refresh
        self.seconds = 0.0
        self.copies = 0

    def count(self, seconds: float, one: Callable[[], object]) -> dict[str, float]:
        """Take steps, the same number on every rank, and see what part of their time the copies and the mail
        have."""
        over = torch.zeros(1)
        start = time.perf_counter()
        with self:
            while not over.item():
                for _ in range(_BLOCK):
                    one()
                over.fill_(time.perf_counter() - start > seconds)
                dist.all_reduce(over)
        spent = time.perf_counter() - start
        return {
            "share": self.seconds / spent,
            "copies": self.copies,
            "copy": self.seconds / max(1, self.copies),
        }

    def forget_credit(self) -> None:
        """A run may copy at every boundary at first. What is promised is what comes after that."""
        self._subject._credit = 0.0

    def __enter__(self) -> _Ledger:
        self._subject.refresh = self._noted
        return self

    def __exit__(self, *_: object) -> None:
        del self._subject.refresh

    def _noted(self, now: float) -> None:
        mail = self._subject.together._mail
        before = mail.cost if mail is not None else 0.0  # of what was mailed during the step
        began = time.perf_counter()
        self._refresh(now)
        self.seconds += before + time.perf_counter() - began
        self.copies += 1


def _timed(steps: Iterator[object], one: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in itertools.islice(steps, _BLOCK):
        one()
    return (time.perf_counter() - start) / _BLOCK * 1e6


def _protected_step(passes: Iterator[object], training: _Training) -> None:
    training.step()
    next(passes)


def _interleaved(blocks: dict[str, Callable[[], float]], pairs: int) -> Times:
    """Microseconds a step; every rank in the same order."""
    times: Times = {name: [] for name in blocks}
    order = random.Random(0)
    for _ in range(pairs):
        for name in order.sample(sorted(blocks), len(blocks)):
            times[name].append(blocks[name]())
    return times


def ddp(folder: Path, pairs: int, seconds: float) -> dict[str, object]:
    """`times`: of each kind of block. `share`: of the copies and the mail in `seconds` of protected steps and
    nothing else, since what they may cost grows also with the time that other blocks take."""
    bare, control, mine = _Training(), _Training(), _Training()
    flag = torch.zeros(1)

    def flagged() -> None:
        bare.step()
        dist.all_reduce(flag)
        flag.item()

    def unprotected(training: _Training, one: Callable[[], object]) -> Callable[[], float]:
        def block() -> float:
            with step._without_hooks(training.optimizer):
                return _timed(itertools.repeat(None), one)

        return block

    with contextlib.ExitStack() as stack:
        meeting, missing = rays.barrier(stack)
        session = ours.Steps(folder / "lastcall-ddp", mine.model, mine.optimizer)
        stack.callback(session.close)
        stack.callback(dist.barrier)  # nobody leaves while another is being measured
        ledger = _Ledger(session)
        passes = iter(session.run.steps(10**12))
        ledger.forget_credit()
        blocks: dict[str, Callable[[], float]] = {
            "bare": unprotected(bare, bare.step),
            "control": unprotected(control, control.step),
            "flag": unprotected(bare, flagged),
            "lastcall": lambda: _timed(passes, mine.step),
        }
        if meeting is not None:

            def with_ray() -> None:
                bare.step()
                meeting()

            blocks["ray"] = unprotected(bare, with_ray)
        _interleaved(blocks, _WARM_UP // _BLOCK)
        times = _interleaved(blocks, pairs)
        account = ledger.count(seconds, lambda: _protected_step(passes, mine))
    return {"times": times, "ray": missing, **account}


def small(folder: Path, pairs: int, seconds: float) -> dict[str, object]:
    """`times` as step._paired has them. `share`: of the copies and the mail in `seconds` of such steps."""
    model, optimizer = step._small()
    session = ours.Steps(folder / "lastcall-small", model, optimizer)
    try:
        passes = session.iterate()
        ledger = _Ledger(session)
        for _ in range(_WARM_UP // _BLOCK):
            # the hooks are dear until they have learned what kind of loop this is
            step._block(passes, optimizer)
        ledger.forget_credit()
        dist.barrier()
        times = step._paired(optimizer, passes, pairs)
        dist.barrier()
        account = ledger.count(seconds, lambda: step._block(passes, optimizer))
        dist.barrier()
    finally:
        session.close()
    return {"times": times, **account}
