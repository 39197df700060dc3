"""Loops as strangers wrote them, to break the promise. Each row trains with what it keeps: a lost value shows
in the weights."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import fractions
import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from helpers.data.pipelines import BATCHES, forever, learn, loader, parts, protect, samples, shape

# inside an epoch, at its end, and inside the next one: one after the other
KILLS = ((5, BATCHES - 1, BATCHES + 5),)
STEPS = 2 * BATCHES


def squash(value: float) -> float:
    """Something near 1 that depends on every bit of a value."""
    return 1.0 + math.tanh(float(value)) / 2


# ---- epochs by a `while` loop of the script's own ----------------------------------------------------------


@shape(kills=KILLS)
def while_epoch_around_batches() -> None:
    data, epoch = loader(), 0
    with protect(data=data) as run:
        while epoch < 2:
            for batch in run.batches(data):
                learn(batch, scale=1 / (1 + epoch))
            epoch += 1


@shape(kills=KILLS)
def while_attribute_around_batches() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.epoch = 0

        def fit(self, data: Any) -> None:
            with protect(data=data) as run:
                while self.epoch < 2:
                    for batch in run.batches(data):
                        learn(batch, scale=1 / (1 + self.epoch))
                    self.epoch += 1

    Trainer().fit(loader())


@shape(kills=KILLS)
def while_around_two_loops() -> None:
    data, other, epoch = loader(), loader(), 0
    with protect() as run:
        while epoch < 1:
            for batch in run.batches(data):
                learn(batch, scale=1 / (1 + epoch))
            for batch in run.batches(other):
                learn(batch, scale=0.5)
            epoch += 1


@shape(kills=KILLS)
def while_with_an_early_stop_and_a_top() -> None:
    """What is done at the top of a pass is done with the variables of the first one, and put back."""
    data, (_, optimizer) = loader(), parts()
    best, bad, epoch = math.inf, 0, 0
    with protect(data=data) as run:
        while bad < 2 and epoch < 3:
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + epoch)
            shift, total, count = random.random(), 0.0, 0
            for (x,) in run.batches(data):
                total += learn(x + shift)
                count += 1
            mean = total / count
            best, bad = (mean, bad) if mean < best else (best, bad + 1)
            epoch += 1


@shape(kills=KILLS)
def while_the_run_has_steps_left_around_batches() -> None:
    data, scale = loader(), 1.0
    with protect(data=data) as run:
        while run.step < STEPS:
            total, count = 0.0, 0
            for batch in run.batches(data):
                total += learn(batch, scale=scale)
                count += 1
            scale = squash(total / count)


@shape(kills=(5,), warned="`for epoch in range(run.step // count, 2)`")
def epochs_reckoned_from_the_step() -> None:
    """Interrupted at the end of an epoch, it would leave out the next one."""
    data = loader()
    with protect(data=data) as run:
        count = len(data)
        for epoch in range(run.step // count, 2):
            for batch in run.batches(data):
                learn(batch, scale=1 / (1 + epoch))


# ---- values with a class -----------------------------------------------------------------------------------


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@shape(kills=KILLS)
def members_of_enumerations() -> None:
    data = loader()
    scales = {Phase.WARM: 0.1, Phase.MAIN: 1.0}
    seen: dict[Phase, int] = {}
    with protect(data=data) as run:
        batches, phase, level = forever(data), Phase.WARM, Level.LOW
        for count in run.steps(STEPS):
            learn(next(batches), scale=scales[phase] * level / (1 + len(seen)))
            seen[phase] = count
            match phase:
                case Phase.WARM if count > 3:
                    phase = Phase.MAIN
                case Phase.MAIN if count > 14:
                    level = Level.HIGH
                case _:
                    pass


class Best(NamedTuple):
    loss: float
    bad: int


@shape(kills=KILLS)
def named_tuple_replaced() -> None:
    data = loader()
    with protect(data=data) as run:
        batches, state = forever(data), Best(math.inf, 0)
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=1 / (1 + state.bad))
            state = Best(loss, 0) if loss < state.loss else state._replace(bad=state.bad + 1)


class Transition(NamedTuple):
    state: torch.Tensor
    reward: float


@shape(kills=KILLS)
def replay_memory_of_named_tuples() -> None:
    """As in PyTorch's DQN tutorial."""
    memory: collections.deque[Transition] = collections.deque(maxlen=20)
    with protect() as run:
        for _ in run.steps(STEPS):
            memory.append(Transition(torch.randn(4), random.random()))
            picked = random.sample(memory, min(4, len(memory)))
            learn([each.state for each in picked], scale=1 + sum(each.reward for each in picked))


@shape(kills=KILLS)
def replay_memory_of_tuples_that_begin_with_an_array() -> None:
    """(state, action, reward, done): comparing its first item with a text gives an array."""
    memory: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=20)
    with protect() as run:
        for _ in run.steps(STEPS):
            memory.append((np.random.rand(4).astype(np.float32), 1, random.random(), False))
            picked = random.sample(memory, min(4, len(memory)))
            learn(
                [torch.from_numpy(state) for state, *_ in picked],
                scale=1 + sum(reward for _, _, reward, _ in picked),
            )


@shape(kills=KILLS)
def decimals_and_fractions() -> None:
    data = loader()
    with protect(data=data) as run:
        batches, exact, part = forever(data), decimal.Decimal(1), fractions.Fraction(1, 2)
        for _ in run.steps(STEPS):
            learn(next(batches), scale=float(exact) * float(part))
            exact *= decimal.Decimal("0.97")
            part *= fractions.Fraction(30, 31)


# ---- objects that the loop makes ---------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    loss: float
    step: int
    worse: list[int] = dataclasses.field(default_factory=list)


@shape(kills=KILLS)
def object_that_was_none() -> None:
    data = loader()
    best: Result | None = None
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(STEPS):
            loss = learn(
                next(batches), scale=1.0 if best is None else squash(best.loss) / (1 + len(best.worse))
            )
            result = Result(loss, step)
            if best is None or result.loss < best.loss:
                best = result
            else:
                best.worse.append(step)


class Keeper:
    def __init__(self) -> None:
        self.best: Result | None = None

    def offer(self, result: Result) -> None:
        if self.best is None or result.loss < self.best.loss:
            self.best = result
        else:
            self.best.worse.append(result.step)


@shape(kills=(BATCHES + 5, *KILLS))
def attribute_that_was_none() -> None:
    data, keeper = loader(), Keeper()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                best = keeper.best
                scale = 1.0 if best is None else squash(best.loss) / (1 + len(best.worse))
                keeper.offer(Result(learn(batch, scale=scale), run.step))


# ---- functions that hold something -------------------------------------------------------------------------


class Average:
    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def push(self, value: float) -> float:
        self.count, self.total = self.count + 1, self.total + value
        return self.total / self.count


def tracker() -> Callable[[float], float]:
    history: list[float] = []

    def track(value: float) -> float:
        history.append(value)
        return sum(history[-5:]) / len(history[-5:])

    return track


def append_to(history: list[float], value: float) -> float:
    history.append(value)
    return sum(history) / len(history)


@shape(kills=KILLS)
def partials_and_methods() -> None:
    data = loader()
    push, track, append = Average().push, functools.partial(tracker()), functools.partial(append_to, [])
    with protect(data=data) as run:
        batches, mean = forever(data), 0.0
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=squash(mean))
            mean = push(loss) + track(loss) + append(loss)


@shape(kills=KILLS)
def list_of_callables() -> None:
    data = loader()
    callbacks = [Average().push, tracker(), functools.partial(Average().push)]
    with protect(data=data) as run:
        batches, mean = forever(data), 0.0
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=squash(mean))
            mean = sum(callback(loss) for callback in callbacks)


@shape(kills=KILLS)
def tuple_of_lists_and_tensors() -> None:
    data = loader()
    logs: tuple[list[float], dict[int, float]] = ([], {})
    hidden = (torch.zeros(2), torch.zeros(2))
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(STEPS):
            loss = learn(
                next(batches), scale=squash(sum(logs[0]) + float(hidden[0].sum()) + sum(logs[1].values()))
            )
            logs[0].append(loss)
            logs[1][step] = loss
            hidden[0].add_(loss)


@shape(kills=KILLS)
def containers_of_the_library() -> None:
    data = loader()
    counts, chained, listed = (
        collections.UserDict(n=0),
        collections.ChainMap({"n": 0}, {"m": 1}),
        collections.UserList[int](),
    )
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(STEPS):
            counts["n"] += 1
            chained["n"] += 2
            listed.append(step)
            learn(next(batches), scale=1 / (counts["n"] + chained["n"] + len(listed)))


_CELL = """
import math
best, patience, losses = math.inf, 0, []
with protect(data=data) as run:
    for epoch in run.epochs(2):
        for i, batch in enumerate(run.batches(data)):
            loss = learn(batch, scale=1 / (1 + patience) + len(losses) * 0.01)
            losses.append(loss)
            if loss < best:
                best = loss
            else:
                patience += 1
"""


@shape(kills=KILLS)
def code_without_a_source() -> None:
    """A variable that an incarnation does not change is saved by it all the same."""
    exec(_CELL, {"__name__": "__main__", "protect": protect, "learn": learn, "data": loader()})


# ---- more of what people do --------------------------------------------------------------------------------


@shape(kills=KILLS)
def windows_with_a_rest_by_the_index() -> None:
    data, (_, optimizer) = loader(), parts()
    with protect(data=data) as run:
        total = len(run.batches(data))
        for _ in run.epochs(2):
            for i, batch in enumerate(run.batches(data), 1):
                learn(batch, update=False, scale=1 / 5)
                if i % 5 == 0 or i == total:
                    optimizer.step()
                    optimizer.zero_grad()


@shape(kills=KILLS)
def clipped_by_the_norms_before() -> None:
    data, (model, optimizer) = loader(), parts()
    norms: list[float] = []
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, update=False)
                norm = nn.utils.clip_grad_norm_(
                    model.parameters(), float(np.percentile(norms, 50)) if norms else 1.0
                )
                norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()


@shape(kills=KILLS)
def hook_that_keeps_activations() -> None:
    data, (model, _) = loader(), parts()
    kept: dict[str, torch.Tensor] = {}
    model.layers[0].register_forward_hook(
        lambda _module, _inputs, out: kept.__setitem__("mean", out.detach().mean())
    )
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch, scale=squash(float(kept["mean"])) if kept else 1.0)


@shape(kills=KILLS)
def batch_size_by_the_loss() -> None:
    dataset, size, best = samples(), 4, math.inf
    with protect() as run:
        for _ in run.epochs(3):
            data = torch.utils.data.DataLoader(dataset, batch_size=size, shuffle=True)
            total = 0.0
            for batch in run.batches(data):
                total += learn(batch)
            if total < best:
                best, size = total, size + 1


@shape(kills=KILLS)
def unfrozen_and_less_dropout_on_the_way() -> None:
    data, (model, _) = loader(), parts()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(STEPS):
            if step == 3:
                for parameter in model.layers[0].parameters():
                    parameter.requires_grad_(True)
            learn(next(batches))
            model.layers[1].p *= 0.9


@shape(kills=KILLS)
def slow_weights_beside_the_fast_ones() -> None:
    data, (model, _) = loader(), parts()
    slow, count = [parameter.detach().clone() for parameter in model.parameters()], 0
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch)
                count += 1
                if count % 5 == 0:
                    with torch.no_grad():
                        for one, parameter in zip(slow, model.parameters(), strict=True):
                            one.add_(parameter - one, alpha=0.5)
                            parameter.copy_(one)


def _decay() -> Any:
    count = 0
    while True:
        yield 1 / (1 + count)
        count += 1


@shape(kills=(5,), warned="the loop carries `rates`")
def rates_from_a_generator() -> None:
    data, rates = loader(), _decay()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches), scale=next(rates))


class Counted:
    """An iterator that counts by hand."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.count = iter(batches), 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> tuple[int, Any]:
        batch = next(self.batches)
        self.count += 1
        return self.count, batch


class CountedFirst(Counted):
    def __next__(self) -> tuple[int, Any]:
        self.count += 1
        return self.count, next(self.batches)


@shape(kills=((5, 17),))
def iterator_that_counts_afterwards() -> None:
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for count, batch in Counted(run.batches(data)):
                learn(batch, scale=1 / count)


@shape(kills=(5,), warned="before it asks run.batches() for the next batch")
def iterator_that_counts_first() -> None:
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for count, batch in CountedFirst(run.batches(data)):
                learn(batch, scale=1 / count)


@shape(kills=(5,), warned="calls itself from step to step")
def recursion() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)

        def descend(average: float) -> float:
            if run.step >= 20:
                return average
            loss = learn(next(batches), scale=1 + min(average, 1.0) / 10)
            run.tick()
            return descend(0.9 * average + loss)

        descend(0.0)


@shape(kills=((5, 17),))
def list_shuffled_at_the_top() -> None:
    data = [torch.full((4,), float(number)) for number in range(BATCHES)]
    with protect() as run:
        for _ in run.epochs(3):
            random.shuffle(data)
            for batch in run.batches(data):
                learn(batch)
