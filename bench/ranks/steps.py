"""What a step costs more with many ranks, while nothing happens: blocks of steps in pairs, as in bench.step, on every rank at once.

`ddp`: steps of DistributedDataParallel, bare, protected, and with what others add to a step in order to agree on a notice. Protected and bare
blocks train models of their own with the same shapes: torch's hooks can be set aside for a bare block, those of the mail can not.
`small`: a step that is nothing but the call of a very small optimizer, without a collective, so that microseconds show.
"""

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
_MOST = 20_000  # steps in which the credit of the start is spent, or never
Times = dict[str, list[float]]


class _Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self._batch = torch.randn(_BATCH, _WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()


class _Ledger:
    """What the copies at boundaries and the mail take, by the clock: as a part of all time they are too little to be seen in a difference."""

    def __init__(self, session: ours.Steps) -> None:
        self._subject: Any = session.run._subject
        self._refresh = self._subject.refresh
        self.seconds = 0.0
        self.copies = 0

    def spend_credit(self, one: Callable[[], object]) -> None:
        """A run may copy at every boundary at first; what is promised is what comes after. All ranks take the same number of steps."""
        for _ in range(_MOST // _BLOCK):
            for _ in range(_BLOCK):
                one()
            left = torch.tensor([max(0.0, self._subject._credit)])
            dist.all_reduce(left)
            if not left.item():
                return

    def __enter__(self) -> _Ledger:
        self._subject.refresh = self._noted
        return self

    def __exit__(self, *_: object) -> None:
        del self._subject.refresh

    def _noted(self, now: float) -> None:
        mail = self._subject._mail
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


def _interleaved(blocks: dict[str, Callable[[], float]], pairs: int) -> Times:
    """Microseconds a step; every rank in the same order."""
    times: Times = {name: [] for name in blocks}
    order = random.Random(0)
    for _ in range(pairs):
        for name in order.sample(sorted(blocks), len(blocks)):
            times[name].append(blocks[name]())
    return times


def ddp(folder: Path, pairs: int) -> dict[str, object]:
    """`times`: of each kind of block. `share`: of the copies and the mail in the time of the protected blocks."""
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
        ledger.spend_credit(lambda: (mine.step(), next(passes)))
        blocks: dict[str, Callable[[], float]] = {
            "bare": unprotected(bare, bare.step),
            "control": unprotected(control, control.step),
            "flag": unprotected(bare, flagged),
            "lastcall": lambda: _timed(passes, mine.step),
        }
        if meeting is not None:
            blocks["ray"] = unprotected(bare, lambda: (bare.step(), meeting()))
        _interleaved(blocks, _WARM_UP // _BLOCK)
        with ledger:
            times = _interleaved(blocks, pairs)
    spent = sum(times["lastcall"]) * _BLOCK / 1e6
    return {"times": times, "ray": missing, **_account(ledger, spent)}


def small(folder: Path, pairs: int, seconds: float) -> dict[str, object]:
    """`times` as step._paired has them. `share`: of the copies and the mail in `seconds` of such steps."""
    model, optimizer = step._small()
    session = ours.Steps(folder / "lastcall-small", model, optimizer)
    try:
        passes = session.iterate()
        ledger = _Ledger(session)
        ledger.spend_credit(lambda: (optimizer.step(), next(passes)))
        dist.barrier()
        times = step._paired(optimizer, passes, pairs)
        dist.barrier()
        with ledger:
            start = time.perf_counter()
            while time.perf_counter() - start < seconds:
                step._block(passes, optimizer)
            spent = time.perf_counter() - start
        dist.barrier()
    finally:
        session.close()
    return {"times": times, **_account(ledger, spent)}


def _account(ledger: _Ledger, spent: float) -> dict[str, object]:
    return {"share": ledger.seconds / spent, "copies": ledger.copies, "copy": ledger.seconds / ledger.copies if ledger.copies else 0.0}
