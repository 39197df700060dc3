"""A4: what a loop carries from pass to pass and nobody handed over. Each row trains with it: a lost value
shows in the weights."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import itertools
import math
import queue
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from helpers.data.pipelines import BATCHES, forever, learn, loader, parts, protect, shape

STEPS = BATCHES + 6


def squash(value: float) -> float:
    """Something near 1 that depends on every bit of a value."""
    return 1.0 + math.tanh(value) / 2


# ---- locals ------------------------------------------------------------------------------------------------


@shape(kills=(7,))
def best_and_patience() -> None:
    data = loader()
    with protect(data=data) as run:
        batches, best, patience, scale = forever(data), math.inf, 0, 1.0
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=scale)
            if loss < best:
                best, patience = loss, 0
            else:
                patience += 1
            if patience > 2:
                scale, patience = scale * 0.5, 0


@shape(kills=(5, BATCHES - 1, (5, BATCHES + 5)))
def early_stopping_by_patience() -> None:
    data = loader()
    with protect(data=data) as run:
        worst, bad = -math.inf, 0
        for _ in run.epochs(4):
            total = 0.0
            for batch in run.batches(data):
                total += learn(batch)
            if total > worst:
                worst, bad = total, 0
            else:
                bad += 1
            if bad >= 2:
                break


@shape(case="X_get_batch_ahead_nanogpt", kills=((7, 12),))
def prefetched_batch() -> None:
    """As nanoGPT does: the next batch is fetched before the step ends."""
    numbers = torch.arange(1000.0)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(0, 990, (4,))
        return numbers[at], numbers[at + 1]

    with protect() as run:
        x, y = get_batch()
        for _ in run.steps(STEPS):
            learn(torch.cat([x, y]))
            x, y = get_batch()


@shape(kills=(7,), slow=True)
def running_average_in_the_learning_rate() -> None:
    data = loader()
    _, optimizer = parts()
    with protect(data=data) as run:
        batches, average = forever(data), None
        for _ in run.steps(STEPS):
            loss = learn(next(batches))
            average = loss if average is None else 0.9 * average + 0.1 * loss
            optimizer.param_groups[0]["lr"] = 1e-2 * squash(average)


@shape(kills=(5, BATCHES - 1, (5, BATCHES + 5)))
def sum_of_an_epoch() -> None:
    data = loader()
    scale = 1.0
    with protect() as run:
        for _ in run.epochs(3):
            total, count = 0.0, 0
            for batch in run.batches(data):
                total += learn(batch, scale=scale)
                count += 1
            scale = squash(total / count)


@shape(kills=(7,))
def tensor_changed_in_place() -> None:
    data = loader()
    noise = torch.zeros(3)
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=squash(float(noise.sum())))
            noise.mul_(0.9).add_(loss)


@shape(kills=(7,), slow=True)
def hidden_state_with_a_graph() -> None:
    data = loader()
    cell = torch.nn.Linear(2, 1)
    with protect(data=data, cell=cell) as run:
        batches, hidden = forever(data), torch.zeros(1)
        for _ in run.steps(STEPS):
            hidden = hidden.detach()
            batch = next(batches)
            hidden = torch.tanh(cell(torch.cat([hidden, batch[0].float().mean().reshape(1) / 100])))
            learn(batch, scale=squash(float(hidden)))


@shape(kills=(7,), slow=True)
def counter_of_its_own() -> None:
    data = loader()
    i = 0
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches), scale=1.0 + (i % 7) / 10)
            i += 1


@shape(kills=(5, BATCHES - 1, (5, BATCHES + 5)))
def read_behind_the_loop() -> None:
    """A resume behind the last batch of an epoch has no pass in which the loss would be set."""
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                loss = learn(batch)
            learn(torch.ones(2), scale=squash(loss))


@shape(kills=(5, BATCHES + 5))
def two_loops_in_an_epoch() -> None:
    """What the first loop gave is read behind the second."""
    data, more = loader(), loader()
    scale = 1.0
    with protect() as run:
        for _ in run.epochs(2):
            total = 0.0
            for batch in run.batches(data):
                total += learn(batch, scale=scale)
            mean = total / len(data)
            for batch in run.batches(more):
                learn(batch, scale=squash(mean))
            scale = squash(mean + 1)


@shape(kills=(7,), slow=True)
def while_loop_with_next() -> None:
    data = loader()
    with protect(data=data) as run:
        batches, scale, steps = forever(data), 1.0, iter(run.steps(STEPS))
        while (step := next(steps, None)) is not None:
            loss = learn(next(batches), scale=scale)
            scale = squash(loss + step)


@shape(kills=(7,), slow=True)
def tuple_of_tensors() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        state = (torch.zeros(2), {"n": torch.zeros(1), "k": 0})
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=squash(float(state[0].sum()) + float(state[1]["n"])))
            state = (state[0] * 0.9 + loss, {"n": state[1]["n"] + 0.1, "k": state[1]["k"] + 1})


@shape(kills=(7,))
def best_weights() -> None:
    """A copy of the best weights, loaded again after the loop."""
    data = loader()
    model, _ = parts()
    with protect(data=data) as run:
        batches, best, kept = forever(data), math.inf, None
        for step in run.steps(STEPS):
            loss = learn(next(batches))
            if loss < best:
                best, kept = loss, copy.deepcopy(model.state_dict())
            if step == STEPS - 2:
                trained = model.trained.clone()
                model.load_state_dict(kept)
                model.trained.copy_(trained)


@shape(kills=(7,))
def deque_of_losses() -> None:
    data = loader()
    recent: collections.deque[float] = collections.deque(maxlen=5)
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            recent.append(learn(next(batches), scale=squash(sum(recent))))


@shape(kills=(7,), slow=True)
def lists_and_dicts() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        history: list[float] = []
        seen: dict[str, list[int]] = collections.defaultdict(list)
        counts: collections.Counter[int] = collections.Counter()
        alias = history
        for step in run.steps(STEPS):
            history.append(learn(next(batches), scale=squash(sum(alias) + len(seen["a"]) + counts[0])))
            seen["a"].append(step)
            counts[step % 2] += 1


@shape(kills=(7,), slow=True)
def written_before_read_is_not_carried() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(STEPS):
            scale = 1.0 + step / 100
            if step > 3:
                scale = 1.0
            loss = learn(next(batches), scale=scale)
            del loss


# ---- functions, methods, closures, globals -----------------------------------------------------------------


@shape(kills=(7,))
def nested_function() -> None:
    data = loader()
    best = math.inf

    def train(run: Any) -> None:
        nonlocal best
        batches = forever(data)
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=squash(min(best, 9.0)))
            best = min(best, loss)

    with protect(data=data) as run:
        train(run)


@shape(kills=(5, BATCHES - 1, (5, BATCHES + 5)), slow=True)
def one_epoch_in_a_function() -> None:
    data = loader()

    def epoch(run: Any, scale: float) -> float:
        total = 0.0
        for batch in run.batches(data):
            total += learn(batch, scale=scale)
        return total

    with protect() as run:
        scale = 1.0
        for _ in run.epochs(3):
            scale = squash(epoch(run, scale) + scale)


@shape(kills=(7,))
def closure_of_a_factory() -> None:
    def smoothed(weight: float) -> Any:
        value = 0.0

        def add(loss: float) -> float:
            nonlocal value
            value = weight * value + (1 - weight) * loss
            return value

        return add

    data, smooth = loader(), smoothed(0.9)
    with protect(data=data) as run:
        batches, scale = forever(data), 1.0
        for _ in run.steps(STEPS):
            scale = squash(smooth(learn(next(batches), scale=scale)))


_best = math.inf
_history: list[float] = []
_shared = SimpleNamespace(scale=1.0)


@shape(kills=(7,))
def globals_of_the_module() -> None:
    global _best
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=squash(min(_best, 9.0) + sum(_history)) * _shared.scale)
            _best = min(_best, loss)
            _history.append(loss)
            _note(loss)


def _note(loss: float) -> None:
    _shared.scale = squash(loss)


@shape(kills=(7,), slow=True)
def attribute_of_a_function() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches), scale=_counted())


def _counted() -> float:
    _counted.calls += 1  # type: ignore[attr-defined]
    return 1.0 + (_counted.calls % 5) / 10  # type: ignore[attr-defined]


_counted.calls = 0  # type: ignore[attr-defined]


class Settings:
    scale = 1.0


@shape(kills=(7,), slow=True)
def attribute_of_a_class() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            Settings.scale = squash(learn(next(batches), scale=Settings.scale))


class Trainer:
    """As minGPT's: the count of steps is an attribute, set where the loop begins."""

    def __init__(self) -> None:
        self.data = loader()
        self.callbacks: dict[str, list[Any]] = collections.defaultdict(list)
        self.iter_num = 0
        self.iter_time = 0.0
        self.meters = {"loss": Meter(), "time": Meter()}

    def run(self, run: Any) -> None:
        batches = forever(self.data)
        self.iter_num = 0
        self.iter_time = time.time()
        for _ in run.steps(STEPS):
            loss = learn(
                next(batches), scale=1.0 + (self.iter_num % 4) / 10 + self.meters["loss"].average() / 100
            )
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.meters["loss"].update(loss)
            self.iter_num += 1
            now = time.time()
            self.iter_dt = now - self.iter_time
            self.iter_time = now
            assert self.iter_dt < 30


class Meter:
    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def update(self, value: float) -> None:
        self.count += 1
        self.total += value

    def average(self) -> float:
        return self.total / max(1, self.count)


@shape(kills=(7,))
def trainer_with_iter_num() -> None:
    trainer = Trainer()
    with protect(data=trainer.data) as run:
        trainer.run(run)


@shape(kills=(5, BATCHES - 1, (5, BATCHES + 5)))
def meter_made_anew_each_epoch() -> None:
    data = loader()
    scale = 1.0
    with protect() as run:
        for _ in run.epochs(3):
            meter = Meter()
            for batch in run.batches(data):
                meter.update(learn(batch, scale=scale * squash(meter.average())))
            scale = squash(meter.average())


@dataclass
class State:
    best: float = math.inf
    losses: list[float] = field(default_factory=list)
    nested: Meter = field(default_factory=Meter)


@shape(kills=(7,))
def dataclass_and_namespaces() -> None:
    data, state, args = loader(), State(), argparse.Namespace(scale=1.0)
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            loss = learn(next(batches), scale=args.scale * squash(state.nested.average() + sum(state.losses)))
            state.best = min(state.best, loss)
            state.losses.append(loss)
            state.nested.update(loss)
            args.scale = squash(state.best)


class Annealed(torch.nn.Module):
    """A module that counts beside its state_dict()."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, value: float) -> float:
        self.temperature *= 0.95
        return value * self.temperature


@shape(kills=(7,))
def number_in_a_module() -> None:
    data, annealed = loader(), Annealed()
    with protect(data=data, annealed=annealed) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches), scale=annealed(1.0))


# ---- tick --------------------------------------------------------------------------------------------------


@shape(kills=(7,))
def tick_with_range_from_the_step() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        scale, best = 1.0, math.inf
        for _ in range(run.step, STEPS):
            loss = learn(next(batches), scale=scale)
            best = min(best, loss)
            scale = squash(best + loss)
            run.tick()


@shape(kills=(7,))
def tick_with_while_and_values_set_before_the_block() -> None:
    data = loader()
    scale = 1.0
    with protect(data=data) as run:
        batches = forever(data)
        while run.step < STEPS:
            scale = squash(learn(next(batches), scale=scale) + scale)
            run.tick()


@shape(kills=(7,), warned="`scale`")
def tick_in_a_loop_that_asks_for_nothing() -> None:
    data = loader()
    with protect(data=data) as run:
        batches, scale, left = forever(data), 1.0, STEPS - run.step
        while left > 0:
            scale = squash(learn(next(batches), scale=scale) + scale)
            left -= 1
            run.tick()


# ---- what cannot be saved ----------------------------------------------------------------------------------


class Item:
    def __init__(self, value: float) -> None:
        self.value = value


@shape(kills=(7,), warned="`heap`")
def list_of_objects() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        heap: list[Item] = []
        for _ in run.steps(STEPS):
            heap.append(Item(learn(next(batches), scale=squash(sum(item.value for item in heap)))))


@shape(kills=(7,), warned="`buffer`", slow=True)
def too_many_items() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        buffer: list[Any] = [(at, at) for at in range(30_000)]
        for _ in run.steps(STEPS):
            buffer.append((1, learn(next(batches), scale=squash(len(buffer) / 1e5))))


# ---- silent ------------------------------------------------------------------------------------------------


@shape(kills=(7,))
def what_people_keep_besides() -> None:
    """Bars, writers, loggers, files, timers, plots: nothing to say about them."""
    import csv
    import io
    import logging

    data = loader()
    table = csv.writer(io.StringIO())
    logger = logging.getLogger("mine")
    handle = io.StringIO()
    counter = itertools.count()
    with protect(data=data) as run:
        batches, started, timings = forever(data), time.time(), []
        last = time.perf_counter()
        for step in run.steps(STEPS):
            loss = learn(next(batches))
            table.writerow([step, loss])
            handle.write(f"{loss}\n")
            logger.info("loss %f", loss)
            now = time.perf_counter()
            timings.append(now - last)
            last = now
            elapsed = time.time() - started
            assert elapsed < 60
            next(counter)


# ---- iterators over something else than a loader -----------------------------------------------------------


def _listed() -> list[torch.Tensor]:
    return [torch.full((4,), float(number)) for number in range(40)]


@shape(kills=(7,), warned="`batches`, which is not saved: it is a `cycle`")
def cycle_over_a_list() -> None:
    batches = itertools.cycle(_listed()[:9])
    with protect() as run:
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape(kills=(7,), warned="`pairs`, which is not saved: it is a `zip`")
def zip_over_lists() -> None:
    with protect() as run:
        pairs = zip(_listed(), _listed(), strict=True)
        for _ in run.steps(STEPS):
            learn(next(pairs))


@shape(kills=(7,), warned="`trainer.batches`, which is not saved: it is a `map`")
def map_over_a_list_of_an_object() -> None:
    trainer = SimpleNamespace(batches=map(torch.neg, _listed()))
    with protect() as run:
        for _ in run.steps(STEPS):
            learn(next(trainer.batches))


@shape(kills=(7,))
def values_of_a_dict() -> None:
    """They know how many are left, as a list's iterator does."""
    batches = iter(dict(enumerate(_listed())).values())
    with protect() as run:
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape(kills=(7,))
def iterators_that_a_pass_makes_and_uses_up() -> None:
    with protect() as run:
        for _ in run.steps(STEPS):
            pairs = zip(_listed()[:2], _listed()[2:4], strict=True)
            learn([torch.cat(pair) for pair in pairs])


# ---- batches that wait where nobody can look ---------------------------------------------------------------


@shape(kills=(7,), warned="`ahead`")
def next_batch_waits_in_a_queue() -> None:
    ahead: queue.Queue[torch.Tensor] = queue.Queue()
    ahead.put(torch.randn(4))
    with protect() as run:
        for _ in run.steps(STEPS):
            batch = ahead.get()
            ahead.put(torch.randn(4))
            learn(batch)


@shape(kills=(7,), warned="`trainer.ahead`")
def next_batch_waits_in_a_simple_queue_of_an_object() -> None:
    trainer = SimpleNamespace(ahead=queue.SimpleQueue())
    trainer.ahead.put([torch.randn(4)])
    with protect() as run:
        for _ in run.steps(STEPS):
            batch = trainer.ahead.get()
            trainer.ahead.put([torch.randn(4)])
            learn(batch)


@shape(kills=(7,), warned="`ahead`")
def next_batch_waits_in_a_future() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool, protect() as run:
        ahead = pool.submit(torch.randn, 4)
        for _ in run.steps(STEPS):
            batch = ahead.result()
            ahead = pool.submit(torch.randn, 4)
            concurrent.futures.wait([ahead])
            learn(batch)


@shape(kills=(7,))
def batches_of_a_loader_wait_in_a_queue() -> None:
    """They are drawn again by the resumed script."""
    data = loader()
    with protect(data=data) as run:
        batches, ahead = forever(data), queue.Queue[Any]()
        ahead.put(next(batches))
        for _ in run.steps(STEPS):
            batch = ahead.get()
            ahead.put(next(batches))
            learn(batch)


@shape(kills=(7,))
def numbers_to_be_written_wait_in_a_queue() -> None:
    """For who writes them down: no trajectory depends on them. So with what a job in the background has
    done."""
    written: queue.Queue[float] = queue.Queue()
    with concurrent.futures.ThreadPoolExecutor(1) as pool, protect() as run:
        job = pool.submit(int, "7")
        for step in run.steps(STEPS):
            written.put(learn(torch.randn(4)))
            if step % 5 == 4:
                assert job.result() == 7
                job = pool.submit(int, "7")
                written.get()


# ---- an object that two functions of the loop know ---------------------------------------------------------


class Tally:
    def __init__(self) -> None:
        self.count = 0


def _epoch_of(run: Any, data: Any, tally: Tally) -> None:
    for batch in run.batches(data):
        learn(batch, scale=1 / (1 + tally.count))


@shape(kills=((BATCHES, BATCHES + 4), (BATCHES + 1, BATCHES + 4), (BATCHES + 4, BATCHES + 6)))
def object_that_the_inner_function_only_reads() -> None:
    """As timm's saver: stopped where the outer function stands, and then in the inner one."""
    data, more, tally = loader(), [torch.full((4,), float(number)) for number in range(2)], Tally()
    with protect(data=data) as run:
        for _ in run.epochs(3):
            _epoch_of(run, data, tally)
            for batch in run.batches(more):
                learn(batch)
                tally.count += 1
