"""State where nobody looks for it: in what is drawn before the loop, in hooks, context variables, coroutines,
modules that the script imports."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.data import annealing
from helpers.data.annealing import annealed
from helpers.data.pipelines import BATCHES, forever, learn, loader, parts, protect, shape

KILLS = (5, BATCHES + 5)
STEPS = 2 * BATCHES


# ---- drawn between the block and the loop ------------------------------------------------------------------


@shape(kills=KILLS)
def noise_drawn_in_the_block_before_steps() -> None:
    data = loader()
    with protect(data=data) as run:
        fixed = 1 + torch.rand(())
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches), scale=float(fixed))


@shape(kills=KILLS)
def noise_drawn_in_the_block_before_epochs() -> None:
    data = loader()
    with protect(data=data) as run:
        fixed = 1 + torch.rand(())
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=float(fixed))


# ---- modules and optimizers --------------------------------------------------------------------------------


class Adaptive(nn.Module):
    """A number and a list beside its state_dict(), and functions that never change."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 1.0
        self.recent: list[float] = []
        self.activations: dict[str, Callable[[float], float]] = {"half": lambda value: value / 2}

    def adapt(self, loss: float) -> None:
        self.recent.append(loss)
        if len(self.recent) == 4:
            self.p *= 0.9
            self.recent = []


@shape(kills=KILLS)
def module_with_a_number_and_a_list() -> None:
    data, adaptive = loader(), Adaptive()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            adaptive.adapt(learn(next(batches), scale=adaptive.activations["half"](adaptive.p)))


class Mean(nn.Module):
    """As torchmetrics: buffers beside the state_dict(), replaced by others in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.defaults = {"value": torch.tensor(0.0), "weight": torch.tensor(0.0)}
        for name, first in self.defaults.items():
            self.register_buffer(name, first.clone(), persistent=False)

    def update(self, value: float) -> None:
        self.value = self.value + value
        self.weight = self.weight + 1

    def reset(self) -> None:
        for name, first in self.defaults.items():
            setattr(self, name, first.clone())


@shape(kills=KILLS)
def metric_of_an_epoch() -> None:
    data, mean, scale = loader(), Mean(), 1.0
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                mean.update(learn(batch, scale=scale))
            scale = 1 / (1 + float(mean.value / mean.weight))
            mean.reset()
            learn(torch.ones(4), scale=scale)


class Annealing(torch.optim.SGD):
    """It counts its steps beside its state_dict()."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step(closure)


@shape(kills=KILLS)
def optimizer_with_an_attribute() -> None:
    data, beside = loader(), nn.Linear(1, 1)
    own = Annealing(beside.parameters())
    with protect(data=data, beside=beside, own=own) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches), scale=1 / (1 + own.count))
            own.step()


def attach(optimizer: torch.optim.Optimizer) -> None:
    count = 0

    def shrink(stepping: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        for group in stepping.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(count)

    optimizer.register_step_pre_hook(shrink)


@shape(kills=KILLS)
def closure_of_an_optimizers_hook() -> None:
    data, (_, optimizer) = loader(), parts()
    attach(optimizer)
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch)


# ---- variables of other kinds ------------------------------------------------------------------------------

temperature = contextvars.ContextVar("temperature", default=1.0)


@shape(kills=KILLS)
def value_of_a_context_variable() -> None:
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=temperature.get())
                temperature.set(temperature.get() * 0.95)


@shape(kills=KILLS)
def global_of_a_module_whose_function_is_imported() -> None:
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=annealed())


@shape(kills=KILLS)
def global_of_a_module_that_is_imported() -> None:
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=annealing.annealed())


_plain_executor: concurrent.futures.ThreadPoolExecutor | None = None
_is_open = False


def executor() -> concurrent.futures.ThreadPoolExecutor:
    """Made at its first use, as a module of the script's own does: it cannot be saved, and the flag says it
    is there."""
    global _plain_executor, _is_open
    if not _is_open:
        _plain_executor = concurrent.futures.ThreadPoolExecutor(1)
        _is_open = True
    assert _plain_executor is not None
    return _plain_executor


@shape(kills=KILLS)
def global_that_says_that_something_is_open() -> None:
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=executor().submit(math.cos, run.step).result())


class Journal:
    """Opened at the first line; counts its lines, which the script acts on."""

    def __init__(self) -> None:
        self.opened = False
        self.file: Any = None
        self.lines = 0

    def write(self, line: object) -> None:
        if not self.opened:
            self.open()
        self.file.write(f"{line}\n")
        self.lines += 1

    def open(self) -> None:
        self.file, self.opened = open(os.devnull, "w"), True


@shape(kills=KILLS)
def attribute_that_says_that_something_is_open() -> None:
    data, journal = loader(), Journal()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=1 / (1 + 0.05 * journal.lines))
                journal.write(run.step)


@shape(kills=KILLS)
def local_that_says_that_something_is_open() -> None:
    data, file, opened, written = loader(), None, False, 0
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=1 / (1 + 0.05 * written))
                if not opened:
                    file = open(os.devnull, "w")
                    opened = True
                assert file is not None
                written += file.write("x")


class Touchy:
    """Answers questions with errors."""

    def __init__(self) -> None:
        self.__dict__["values"] = {"a": 1}

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"what is {name}?")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("never the same")

    __hash__ = None  # type: ignore[assignment]


@shape(kills=(8,))
def object_that_answers_with_errors() -> None:
    data, touchy = loader(), Touchy()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=1 / touchy.__dict__["values"]["a"])
                touchy.__dict__["values"]["a"] += 1


_best = 1.0


@shape(kills=KILLS)
def global_of_the_script_whose_loop_is_in_a_module() -> None:
    """As minGPT's adder: the Trainer has the loop, the script a callback and a global."""
    data = loader()

    def step(batch: Any) -> None:
        global _best
        _best = min(_best * 0.99, learn(batch, scale=_best))

    annealing.train(protect, forever(data), step, STEPS)


def gentle() -> float:
    return 0.5


def full() -> float:
    return 1.0


@shape(kills=(8,), warned="another function")
def function_of_a_second_phase() -> None:
    data = loader()
    with protect(data=data) as run:
        batches, scale = forever(data), full
        for step in run.steps(BATCHES):
            learn(next(batches), scale=scale())
            if step == 2:
                scale = gentle


# ---- loops -------------------------------------------------------------------------------------------------


@shape(kills=KILLS)
def batches_awaited_in_the_loop() -> None:
    async def fetch(batches: Any) -> Any:
        await asyncio.sleep(0)
        return next(batches)

    async def main() -> None:
        data = loader()
        with protect(data=data) as run:
            batches = forever(data)
            for _ in run.steps(STEPS):
                learn(await fetch(batches))

    asyncio.run(main())


@shape(kills=(5,), warned="another coroutine")
def batches_of_a_coroutine_beside_the_loop() -> None:
    async def produce(data: Any, waiting: asyncio.Queue[Any]) -> None:
        for _ in range(2):
            for batch in data:
                await waiting.put(batch)
        await waiting.put(None)

    async def main() -> None:
        data, waiting = loader(), asyncio.Queue[Any](2)
        with protect(data=data) as run:
            producer = asyncio.create_task(produce(data, waiting))
            while (batch := await waiting.get()) is not None:
                learn(batch)
                run.tick()
            await producer

    asyncio.run(main())


@shape(kills=(5,), warned="starts from the beginning in an epoch that is resumed")
def own_range_with_ticks_in_an_epoch() -> None:
    samples = torch.arange(24.0)
    with protect() as run:
        for _ in run.epochs(2):
            for first in range(0, 24, 4):
                learn(samples[first : first + 4])
                run.tick()


@shape(kills=KILLS)
def batches_by_an_assignment_expression() -> None:
    data, scale = loader(), 1.0
    with protect(data=data) as run:
        for _ in run.epochs(2):
            batches, total = iter(run.batches(data)), 0.0
            while (batch := next(batches, None)) is not None:
                total += learn(batch, scale=scale)
            scale = 1 / (1 + total)


@shape(kills=KILLS)
def batch_that_is_tried_again() -> None:
    data, failures = loader(), 0
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                for attempt in range(2):
                    try:
                        if attempt == 0 and float(batch[0][0]) > 24:
                            raise RuntimeError("out of memory")
                        learn(batch, scale=1 / (1 + failures))
                        break
                    except RuntimeError:
                        failures += 1
