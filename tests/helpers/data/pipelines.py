"""Tables of training loops ("shapes"): each is run undisturbed and preempted at several batches, and what it
trained is compared.

A shape is a function that reads like a training script. It makes everything anew, trains with learn(), and is
registered by @shape:

    @shape(kills=(5, 11, 17))                                # identical and silent, whenever it is preempted
    def plain_steps():
        data = loader()
        with protect(data=data) as run:
            batches = forever(data)
            for _ in run.steps(30):
                learn(next(batches))

    @shape(warned="itertools.cycle")                         # the first incarnation warns with these words,
    and says `exact: false`

Every incarnation is a process of its own (a fork of the nursery's child), gets a real SIGTERM in the middle
of the step that trains batch number `kill` (from 0; a tuple: one for each incarnation), and must end with 75.
Played by tests/e2e/test_shapes.py.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lastcall
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.storage.files import Files

BATCHES = 12  # of a pass over loader()
_WAIT = 60.0
Kills = int | tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    name: str
    loop: Callable[[], None]
    kills: tuple[Kills, ...] = (5, BATCHES - 1, BATCHES + 5)
    # words of the one warning in the first incarnation; "" is identical, exact, and no warning at all
    warned: str = ""
    refused: str = ""  # words of the error that protect() or the loop raises at once
    slow: bool = False
    seeded: bool = True  # the script seeds everything alike in every incarnation
    may_say: tuple[str, ...] = ()  # parts of warnings that are right to come, also where the run is identical
    repeatable: bool = True  # the same again, where nothing disturbs it
    case: str | tuple[str, ...] = ()  # names in pipelines_cases.txt that this row rebuilds
    needs: tuple[str, ...] = ()  # modules that are not in requirements-dev.txt


TABLE: dict[str, Shape] = {}


def shape(**options: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def enter(loop: Callable[[], None]) -> Callable[[], None]:
        name = f"{loop.__module__.rpartition('.')[2]}.{loop.__name__}"
        assert name not in TABLE, name
        TABLE[name] = Shape(name, loop, **options)
        return loop

    return enter


# ---- what a shape uses -------------------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout draws from torch's generator at every step. `trained` counts the batches, and comes back with
    the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.register_buffer("trained", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(batch.reshape(-1, 1) / 100)
        return out


class _Life:
    """One incarnation, in the process that is it."""

    def __init__(self, folder: Path, kill: int | None, on: bool) -> None:
        self.folder = folder
        self.kill = kill
        self.on = on
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.lines: list[tuple[int, list[float], str]] = []
        self.run: Any = None


_life: _Life


def parts() -> tuple[Net, torch.optim.Optimizer]:
    """The model and the optimizer of this incarnation."""
    return _life.model, _life.optimizer


def protect(**state: Any) -> Any:
    """lastcall.protect() with the model and the optimizer, in the run directory of this row."""
    config = lastcall.JITCheckpointConfig(enabled=_life.on, kill_wait=0.0, grace=_WAIT)
    handed = {"model": _life.model, "optimizer": _life.optimizer, **state}
    _life.run = lastcall.protect(_life.folder / "run", config=config, **handed)
    return _life.run


def learn(batch: Any, *, update: bool = True, scale: float = 1.0) -> float:
    """Train one batch (anything made of tensors and numbers). `update=False`: gradients are only
    accumulated."""
    x = torch.cat([part.detach().double().reshape(-1) for part in _tensors(batch)]).float()
    model, optimizer = _life.model, _life.optimizer
    place = int(model.trained)
    loss = model(x).square().mean() * scale
    loss.backward()
    with torch.no_grad():
        model.trained += 1
    if update:
        optimizer.step()
        optimizer.zero_grad()
    _life.lines.append((place, x.tolist(), hashlib.md5(x.numpy().tobytes()).hexdigest()))
    if _life.kill == place:
        _life.kill = None
        strike()
    return float(loss.detach())


def strike() -> None:
    """SIGTERM to this process, and the next boundary will answer it."""
    os.kill(os.getpid(), signal.SIGTERM)
    driver, deadline = _life.run._driver, time.monotonic() + _WAIT
    while not driver.session.open:
        assert time.monotonic() < deadline, "nobody heard SIGTERM"
        time.sleep(0.001)


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        return [tensor for value in batch.values() for tensor in _tensors(value)]
    if isinstance(batch, list | tuple):
        return [tensor for value in batch for tensor in _tensors(value)]
    return [torch.as_tensor(batch)]


def samples(count: int = 4 * BATCHES) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)))


def loader(**options: Any) -> DataLoader[Any]:
    """BATCHES batches of 4, shuffled."""
    dataset = options.pop("dataset", None)
    return DataLoader(
        samples() if dataset is None else dataset, **{"batch_size": 4, "shuffle": True, **options}
    )


def forever(data: Any) -> Iterator[Any]:
    while True:
        yield from data


# ---- one incarnation ---------------------------------------------------------------------------------------


@dataclass
class Told:
    """What an incarnation leaves behind."""

    code: int = -1
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    lines: list[tuple[int, list[float], str]] = field(default_factory=list)
    weights: str = ""
    resumed: int | None = None
    exact: bool | None = None  # of the newest checkpoint
    because: str = ""


class _Warnings(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())


def _live(shape: Shape, folder: Path, number: int, kill: int | None, on: bool) -> Told:
    """In the forked process: the script, and what is to be told of it."""
    global _life
    # the first is as the undisturbed one, so that what they train can be compared
    base = 0 if shape.seeded else 1000 * number
    random.seed(base + 1)
    np.random.seed(base + 2)
    torch.manual_seed(base + 3)
    told = Told()
    logging.getLogger("lastcall").addHandler(_Warnings(told.warnings))
    logging.getLogger("lastcall").addHandler(logging.StreamHandler())
    _life = _Life(folder, kill, on)
    try:
        shape.loop()
        told.code = 0
    except SystemExit as stop:
        told.code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException as error:
        traceback.print_exc()
        told.code, told.error = 1, f"{type(error).__name__}: {error}"
    told.lines = _life.lines
    digest = hashlib.md5()
    for name, tensor in sorted(_life.model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    told.weights = digest.hexdigest()
    if _life.run is not None:
        told.resumed = _life.run.resumed
    return told


def incarnation(shape: Shape, folder: Path, number: int, kill: int | None, on: bool = True) -> Told:
    """Fork it, and wait for its end."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / f"told-{number}.json"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            print(
                f"---- {shape.name}: incarnation {number} in {folder.name}, kill {kill}",
                file=sys.stderr,
                flush=True,
            )
            told = _live(shape, folder, number, kill, on)
            result.write_text(json.dumps(asdict(told)))
            code = told.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    told = Told(**json.loads(result.read_text())) if result.exists() else Told(error="died")
    told.code = code
    if on and (found := Catalog(folder / "run", Files()).entries()):
        told.exact, told.because = found[0].record.exact, found[0].record.because
    return told


# ---- what came of it ---------------------------------------------------------------------------------------


def play(shape: Shape, folder: Path) -> list[str]:
    """What is wrong with this row; nothing, if it does what its table says."""
    whole = incarnation(shape, folder / "whole", 0, None)
    if shape.refused:
        refused = whole.code == 1 and shape.refused in whole.error
        return [] if refused else [f"not refused with {shape.refused!r}: {whole.code} {whole.error}"]
    if whole.code != 0:
        return [f"uninterrupted: ended with {whole.code} {whole.error}"]
    wrong: list[str] = []
    off = incarnation(shape, folder / "off", 0, None, on=False)
    if shape.repeatable and (off.lines, off.weights) != (whole.lines, whole.weights):
        wrong.append(f"lastcall changes what is trained: {_difference(off.lines, whole.lines)}")
    wrong += _words(shape, whole, "uninterrupted")
    for kills in shape.kills:
        several = kills if isinstance(kills, tuple) else (kills,)
        wrong += [
            f"killed at {kills}: {text}"
            for text in _killed(shape, whole, folder / f"kill-{'-'.join(map(str, several))}", several)
        ]
    return wrong


def _killed(shape: Shape, whole: Told, folder: Path, kills: tuple[int, ...]) -> list[str]:
    trained: dict[int, Any] = {}
    wrong: list[str] = []
    for number, kill in enumerate((*kills, None)):
        told = incarnation(shape, folder, number, kill)
        if told.code != (0 if kill is None else 75):
            return [*wrong, f"incarnation {number} ended with {told.code} {told.error}"]
        if told.lines:
            first = told.lines[0][0]
            trained = {place: line for place, line in trained.items() if place < first}
        trained.update({line[0]: line for line in told.lines})
        if number == 0 or not shape.warned:
            wrong += _words(shape, told, f"incarnation {number}")
    if shape.warned:
        return wrong
    if ([*trained.values()], told.weights) != (whole.lines, whole.weights):
        wrong.append(f"silently different: {_difference(whole.lines, [*trained.values()])}")
    return wrong


# a busy machine, and nothing about the data: what was rescued is compared all the same
_SLOW = "No boundary in time"


def _words(shape: Shape, told: Told, who: str) -> list[str]:
    said = [text for text in told.warnings if not any(part in text for part in (*shape.may_say, _SLOW))]
    if not shape.warned:
        wrong = [f"{who}: a false alarm: {text}" for text in said]
        if told.exact is False:
            wrong.append(f"{who}: exact: false, because {told.because}")
        return wrong
    matching = [text for text in said if shape.warned in text]
    wrong = [] if len(matching) == 1 else [f"{who}: not one warning with {shape.warned!r}, but {said}"]
    if told.exact is not False or shape.warned not in told.because:
        wrong.append(f"{who}: the record says exact: {told.exact} ({told.because})")
    return wrong


def _difference(one: list[Any], other: list[Any]) -> str:
    for (place, values, _), (other_place, others, _) in zip(one, other, strict=False):
        if (place, values) != (other_place, others):
            return f"batch {place} is {values[:8]}, and was to be batch {other_place} {others[:8]}"
    return (
        f"{len(one)} and {len(other)} batches"
        if len(one) != len(other)
        else "the same batches, other weights"
    )


def main(module: str, names: list[str]) -> None:
    """`python pipelines_child.py MODULE NAME ...` in a folder of its own: one JSON line for each row."""
    importlib.import_module(module)
    for name in names:
        wrong = play(TABLE[name], Path.cwd() / name)
        print(json.dumps({"name": name, "wrong": wrong}), flush=True)
