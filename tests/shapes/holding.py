"""What a data pipeline holds of its own: samplers, datasets, transforms and collate functions with state."""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    random_split,
)

from helpers.data.pipelines import BATCHES, forever, learn, loader, protect, samples, shape

COUNT = 4 * BATCHES
EPOCHS = 3


def train(data: Any, epochs: int = EPOCHS) -> None:
    with protect() as run:
        for _ in run.epochs(epochs):
            for batch in run.batches(data):
                learn(batch)


def train_steps(data: Any, steps: int = EPOCHS * BATCHES) -> None:
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(steps):
            learn(next(batches))


# ---- G6: samplers ------------------------------------------------------------------------------------------


class Numbers(Sampler[int]):
    def __len__(self) -> int:
        return COUNT


class OwnEpochs(Numbers):
    ep = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.ep)
        self.ep += 1
        return iter(torch.randperm(COUNT, generator=generator).tolist())


class OwnEpochsLate(Numbers):
    """Counts when the pass is over, in a generator function, in an object of its own."""

    class Counter:
        value = 0

    def __init__(self) -> None:
        self.counter = self.Counter()

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.counter.value)).tolist()
        self.counter.value += 1


class OwnStateDict(OwnEpochs):
    def state_dict(self) -> dict[str, int]:
        return {"ep": self.ep}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.ep = state["ep"]


class InPlace(Numbers):
    def __init__(self) -> None:
        self.order = list(range(COUNT))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


class InPlaceBatches(Sampler[list[int]]):
    def __init__(self) -> None:
        self.batches = [list(range(4 * number, 4 * number + 4)) for number in range(BATCHES)]

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        yield from self.batches


class RngInDict(Numbers):
    def __init__(self) -> None:
        self.parts = {"rng": np.random.default_rng(3)}

    def __iter__(self) -> Iterator[int]:
        return iter(self.parts["rng"].permutation(COUNT).tolist())


class DrawnOnce(Numbers):
    """An order that is drawn at the first pass, and kept."""

    order: list[int] | None = None

    def __iter__(self) -> Iterator[int]:
        if self.order is None:
            self.order = torch.randperm(COUNT).tolist()
        self.order.reverse()
        return iter(self.order)


class ClassCounter(Numbers):
    passes = 0

    def __iter__(self) -> Iterator[int]:
        ClassCounter.passes += 1
        return iter(torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.passes)).tolist())


GLOBAL_RNG = np.random.default_rng(11)


class FromGlobal(Numbers):
    def __iter__(self) -> Iterator[int]:
        return iter(GLOBAL_RNG.permutation(COUNT).tolist())


def _sampled(sampler: Any, **options: Any) -> Any:
    return loader(shuffle=False, sampler=sampler, **options)


@shape(case="E_sampler_own_epoch_counter")
def sampler_own_epochs() -> None:
    """G6"""
    train(_sampled(OwnEpochs()))


@shape(case="S_sampler_own_epoch_counter")
def sampler_own_epochs_steps() -> None:
    """G6"""
    train_steps(_sampled(OwnEpochs()))


@shape(kills=(5, 17, (14, 20)))
def sampler_own_epochs_workers() -> None:
    """G6"""
    train(_sampled(OwnEpochs(), num_workers=2))


@shape(kills=(11, 17, (5, 17, 30)))
def sampler_own_epochs_late() -> None:
    """G6"""
    train(_sampled(OwnEpochsLate()))


@shape(case="E_sampler_own_state_dict", kills=(17,))
def sampler_own_state_dict() -> None:
    """G6"""
    train(_sampled(OwnStateDict()))


@shape(case="E_sampler_inplace_shuffle", kills=(5, 17, (14, 20, 26)))
def sampler_in_place() -> None:
    """G6"""
    train(_sampled(InPlace()))


@shape(kills=(17, 23))
def sampler_in_place_batches() -> None:
    """G6"""
    train(DataLoader(samples(), batch_sampler=InPlaceBatches()))


@shape(case="E_sampler_rng_in_dict", kills=(5, 17, (14, 20)))
def sampler_rng_in_dict() -> None:
    """G6"""
    train(_sampled(RngInDict()))


@shape(kills=(5, 17))
def sampler_drawn_once() -> None:
    """G6"""
    train(_sampled(DrawnOnce()))


@shape(kills=(17,))
def sampler_class_counter() -> None:
    """G6"""
    train(_sampled(ClassCounter()))


@shape(kills=(5, 17))
def sampler_global_rng() -> None:
    """G6"""
    train(_sampled(FromGlobal()))


@shape(kills=(17,))
def sampler_in_batch_sampler() -> None:
    """G6"""
    train(DataLoader(samples(), batch_sampler=BatchSampler(OwnEpochs(), 4, False)))


# ---- G8: weights that training changes ---------------------------------------------------------------------


def _hard(handed: bool) -> None:
    weights = torch.ones(COUNT, dtype=torch.double)
    sampler = WeightedRandomSampler(weights, COUNT)  # type: ignore[arg-type]
    sampler.weights = weights
    data = loader(shuffle=False, sampler=sampler)
    with protect(**({"weights": weights} if handed else {})) as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.batches(data):
                learn(batch)
                weights[batch[0].long()] *= 1.5


@shape(case="Z_hard_weights_handed", kills=(5, 17, (5, 8, 17)))
def weights_handed() -> None:
    """G8"""
    _hard(True)


@shape(kills=(5, 17))
def weights_not_handed() -> None:
    """G8"""
    _hard(False)


def _made_for_each_epoch(around: Any = None, **options: Any) -> None:
    """The sampler has a copy of the weights, as they are when its epoch begins."""
    weights = torch.ones(COUNT)
    with protect() as run:
        for _ in run.epochs(EPOCHS):
            sampler = WeightedRandomSampler(weights, COUNT)  # type: ignore[arg-type]
            data: Any = loader(shuffle=False, sampler=sampler, **options)
            for batch in run.batches(data if around is None else around(data)):
                learn(batch)
                weights[batch[0].long()] *= 1.5


@shape(kills=(0, 5, BATCHES - 1, (5, BATCHES + 5)))
def weights_of_a_loader_for_each_epoch() -> None:
    _made_for_each_epoch()


@shape(kills=(5,), slow=True)
def weights_of_a_loader_with_workers_for_each_epoch() -> None:
    _made_for_each_epoch(num_workers=2)


class _Around:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:  # noqa: UP028
            yield batch


@shape(kills=(5, BATCHES + 5))
def weights_of_a_wrapped_loader_for_each_epoch() -> None:
    _made_for_each_epoch(_Around)


class _Sharper(Sampler[int]):
    """Draws each index when it is asked for it, as often as its numbers say."""

    def __init__(self, odds: list[float], sharpness: float, extra: int) -> None:
        self.odds = odds
        self.sharpness = sharpness
        self.extra = extra

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        for _ in range(COUNT):
            odds = [odd**self.sharpness + self.extra for odd in self.odds]
            yield random.choices(range(COUNT), odds)[0]


@shape(kills=(5, BATCHES + 5))
def numbers_of_a_lazy_sampler_for_each_epoch() -> None:
    odds, sharpness, extra = [1.0] * COUNT, 1.0, 0
    with protect() as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.batches(loader(shuffle=False, sampler=_Sharper(list(odds), sharpness, extra))):
                sharpness = 0.9 * sharpness + min(learn(batch), 1.0)
                extra += 1
                for number in batch[0].long().tolist():
                    odds[number] *= 1.2


# ---- G6: iterable datasets ---------------------------------------------------------------------------------


class Stream(IterableDataset[float]):
    def __init__(self) -> None:
        self.ep = 0

    def __iter__(self) -> Iterator[float]:
        self.ep += 1
        yield from torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.ep)).double().tolist()


class StreamOwnRng(IterableDataset[float]):
    def __init__(self) -> None:
        self.random = random.Random(4)

    def __iter__(self) -> Iterator[float]:
        order = list(range(COUNT))
        self.random.shuffle(order)
        yield from map(float, order)


class StreamPosition(IterableDataset[float]):
    """Goes on where it stopped, and has a state_dict() that says where."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[float]:
        for _ in range(COUNT):
            self.at += 1
            yield float(self.at * 7 % 101)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StreamFile(IterableDataset[float]):
    """A file that stays open: every pass reads on."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile("w+")
        self.file.write("".join(f"{number:4d}\n" for number in range(COUNT * 4)))
        self.file.seek(0)

    def __iter__(self) -> Iterator[float]:
        for _ in range(COUNT):
            yield float(self.file.readline())


class StreamCursor(IterableDataset[float]):
    """Reads on from a generator that no pass begins anew."""

    def __init__(self) -> None:
        self.cursor = (float(number) for number in itertools.count())

    def __iter__(self) -> Iterator[float]:
        yield from itertools.islice(self.cursor, COUNT)


@shape(case="E_iter_own_epoch_counter_w0", kills=(5, 11, 17, (14, 20)))
def iterable_own_epochs() -> None:
    """G6"""
    train(DataLoader(Stream(), 4))


@shape(case="S_iter_own_epoch_counter_w0", kills=(17,))
def iterable_own_epochs_steps() -> None:
    """G6"""
    train_steps(DataLoader(Stream(), 4))


@shape(case="E_iter_own_rng_attr_w0", kills=(5, 17))
def iterable_own_rng() -> None:
    """G6"""
    train(DataLoader(StreamOwnRng(), 4))


@shape(case="E_iter_shared_generator_w0", kills=(5, 17))
def iterable_shared_generator() -> None:
    """G6"""
    generator = torch.Generator().manual_seed(6)

    class Shared(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            yield from torch.randperm(COUNT, generator=generator).double().tolist()

    train(DataLoader(Shared(), 4))


@shape(case="E_L_dl_stateful_iterable_w0", kills=(5, 17, (14, 20)))
def iterable_own_position() -> None:
    """G6"""
    train(DataLoader(StreamPosition(), 4))


@shape(case="E_iter_open_file_across_passes_w0", kills=(5, 17))
def iterable_open_file() -> None:
    """G6"""
    train(DataLoader(StreamFile(), 4))


@shape(warned="`dataset.cursor`", kills=(17,))
def iterable_cursor() -> None:
    """G6"""
    train(DataLoader(StreamCursor(), 4))


# ---- G7: datasets, transforms and collate functions without workers ----------------------------------------


class Held(Dataset[float]):
    """Each kind of thing that a dataset may hold, and that changes with the samples it makes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls = 0
        self.rng = np.random.default_rng(5)
        self.cache: dict[int, float] = {}
        self.transform = functools.partial(_shift, generator=torch.Generator().manual_seed(9))
        self.seen: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        return float(index) + getattr(self, self.kind)(index)

    def counter(self, index: int) -> float:
        self.calls += 1
        return self.calls / 1000

    def own_rng(self, index: int) -> float:
        return float(self.rng.random())

    def random_cache(self, index: int) -> float:
        if index not in self.cache:
            self.cache[index] = random.random()
        return self.cache[index]

    def transforms(self, index: int) -> float:
        return float(self.transform(torch.zeros(())))

    def history(self, index: int) -> float:
        self.seen.append(index)
        return sum(self.seen[-5:]) / 1000


def _shift(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + torch.rand((), generator=generator)


def _held(kind: str, **options: Any) -> Any:
    return loader(dataset=Held(kind), **options)


@shape(case="E_ds_counter_w0", kills=(5, 17))
def dataset_counter() -> None:
    """G7"""
    train(_held("counter"))


@shape(case="E_ds_own_rng_w0", kills=(5, 17, (14, 20)))
def dataset_own_rng() -> None:
    """G7"""
    train(_held("own_rng"))


@shape(case="S_ds_own_rng_w0", kills=(5,))
def dataset_own_rng_steps() -> None:
    """G7"""
    train_steps(_held("own_rng"))


@shape(case="E_ds_random_cache_w0", kills=(5, 17))
def dataset_random_cache() -> None:
    """G7"""
    train(_held("random_cache"))


@shape(case="E_ds_transform_generator_w0", kills=(5, 17))
def dataset_transform_generator() -> None:
    """G7"""
    train(_held("transforms"))


@shape(kills=(5, 17))
def dataset_history() -> None:
    """G7"""
    train(_held("history"))


@shape(case="E_collate_counter_w0", kills=(5, 17))
def collate_counter() -> None:
    """G7"""
    calls = 0

    def collate(rows: list[Any]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.stack([row[0] for row in rows]) + calls / 1000

    train(loader(collate_fn=collate))


@shape()
def dataset_deterministic_cache_too_large() -> None:
    """Not random, so that nothing is lost with it: no alarm."""

    class Cached(Dataset[float]):
        def __init__(self) -> None:
            self.cache: dict[int, Any] = {}
            self.handle: Any = None

        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> float:
            if self.handle is None:
                self.handle = object()
            if index not in self.cache:
                self.cache[index] = np.full(100_000, index)
            return float(self.cache[index][0])

    train(loader(dataset=Cached()))


# ---- G11, G12 ----------------------------------------------------------------------------------------------


@shape(case="X_unseeded_random_split", kills=(5, 17), seeded=False)
def unseeded_random_split() -> None:
    """G11, G12"""
    part, _ = random_split(samples(2 * COUNT), [COUNT, COUNT])
    train(loader(dataset=part))


@shape(case="X_curriculum_mutating_dataset", kills=(5, 17))
def dataset_changed_at_the_top() -> None:
    """X_curriculum_mutating_dataset: a false alarm before."""
    dataset = Subset(samples(), list(range(16)))
    data = loader(dataset=dataset)
    with protect() as run:
        for epoch in run.epochs(EPOCHS):
            dataset.indices = list(range(16 + 8 * epoch))
            for batch in run.batches(data):
                learn(batch)


@shape(case="X_curriculum_mutated_at_end", kills=(2, 6, 9))
def dataset_grown_at_the_end() -> None:
    """G11, G12"""
    dataset = Subset(samples(), list(range(16)))
    data = loader(dataset=dataset)
    with protect() as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.batches(data):
                learn(batch)
            dataset.indices.extend(range(len(dataset), len(dataset) + 8))  # type: ignore[attr-defined]


@shape(kills=(2, 6, 9))
def dataset_grown_at_the_top() -> None:
    """G11, G12"""
    dataset = Subset(samples(), list(range(8)))
    data = loader(dataset=dataset)
    with protect() as run:
        for _ in run.epochs(EPOCHS):
            dataset.indices.extend(range(len(dataset), len(dataset) + 8))  # type: ignore[attr-defined]
            for batch in run.batches(data):
                learn(batch)


# ---- G7, G6: in worker processes ---------------------------------------------------------------------------


@shape(case="E_ds_own_rng_w2", kills=(5, 17, (3, 7)))
def workers_own_rng() -> None:
    """G7, G6"""
    train(_held("own_rng", num_workers=2))


@shape(kills=(5, 17))
def workers_own_rng_persistent() -> None:
    """G7, G6"""
    train(_held("own_rng", num_workers=2, persistent_workers=True))


def _reseed(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.rng = np.random.default_rng(100 + worker)


@shape(case="E_ds_own_rng_winit_w2", kills=(5, 17), slow=True)
def workers_own_rng_seeded_by_worker() -> None:
    """G7, G6"""
    train(_held("own_rng", num_workers=2, worker_init_fn=_reseed))


@shape(case="E_ds_random_cache_w2_persist", kills=(5, 17))
def workers_random_cache_persistent() -> None:
    """G7, G6"""
    train(_held("random_cache", num_workers=2, persistent_workers=True))


@shape(kills=(5,), slow=True)
def workers_counter() -> None:
    """G7, G6"""
    train(_held("counter", num_workers=2))


@shape(case="E_collate_counter_w2", kills=(5, 17), slow=True)
def workers_collate_counter() -> None:
    """G7, G6"""
    calls = [0]

    def collate(rows: list[Any]) -> torch.Tensor:
        calls[0] += 1
        return torch.stack([row[0] for row in rows]) + calls[0] / 1000

    train(loader(collate_fn=collate, num_workers=2))


@shape(kills=(5, 17))
def workers_iterable_own_epochs_persistent() -> None:
    """G7, G6"""
    train(DataLoader(Stream(), 4, num_workers=1, persistent_workers=True))


class WorkerCursor(Dataset[float]):
    def __init__(self) -> None:
        self.cursor: Any = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        if self.cursor is None:
            self.cursor = (float(number) for number in itertools.count())
        return next(self.cursor) / 1000 + index


@shape(warned="`dataset.cursor`", kills=(5,))
def workers_cursor() -> None:
    """G7, G6"""
    train(loader(dataset=WorkerCursor(), num_workers=1))


@shape(warned="`dataset.cursor`", kills=(5,))
def dataset_cursor() -> None:
    """G7, G6"""
    train(loader(dataset=WorkerCursor()))


# ---- G3, G4: draws in the middle of a pass -----------------------------------------------------------------


class Chunks(Numbers):
    def __init__(self, size: int, draw: Any) -> None:
        self.size = size
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        for start in range(0, COUNT, self.size):
            yield from (start + number for number in self.draw(self.size))


def _python_order(size: int) -> list[int]:
    return random.sample(range(size), size)


@shape(case=("E_sampler_lazy_chunk24", "Z_lazy_chunk24_w0_mid"), kills=(3, 8, 17, (8, 10, 20)))
def sampler_chunks() -> None:
    """G4: the second chunk is drawn at the seventh draw, after dropout has drawn."""
    train(_sampled(Chunks(24, lambda size: torch.randperm(size).tolist())))


@shape(case="E_sampler_lazy_chunk24_w2", kills=(5, 8, 17))
def sampler_chunks_workers() -> None:
    """G3, G4"""
    train(_sampled(Chunks(24, lambda size: torch.randperm(size).tolist()), num_workers=2))


@shape(kills=(8,))
def sampler_chunks_numpy() -> None:
    """G3, G4"""
    train(_sampled(Chunks(12, lambda size: np.random.permutation(size).tolist())))


@shape(case="E_sampler_lazy_each", kills=(8, 17))
def sampler_draws_each() -> None:
    """G3, G4"""
    train(_sampled(Chunks(4, lambda size: torch.randperm(size).tolist())))


class Buffer(IterableDataset[float]):
    """`draw` chooses a place in the buffer; `noise` is added before a sample waits there."""

    def __init__(self, draw: Any, noise: Any = None, count: int = COUNT) -> None:
        self.draw = draw
        self.noise = noise
        self.count = count

    def __iter__(self) -> Iterator[float]:
        waiting: list[float] = []
        for number in range(self.count):
            sample = float(number) + (self.noise() if self.noise is not None else 0.0)
            if len(waiting) < 10:
                waiting.append(sample)
                continue
            place = self.draw(10)
            yield waiting[place]
            waiting[place] = sample
        yield from waiting


def _torch_place(size: int) -> int:
    return int(torch.randint(size, (1,)))


@shape(case="E_iter_buffer_torchglobal_w0", kills=(5, 17, (3, 7, 20)))
def iterable_buffer_torch() -> None:
    """G3, G4"""
    train(DataLoader(Buffer(_torch_place), 4))


@shape(case="E_iter_buffer_globalrandom_w0", kills=(5, 17))
def iterable_buffer_augmented() -> None:
    """G3, G4"""
    train(DataLoader(Buffer(random.randrange, lambda: float(torch.rand(()))), 4))


@shape(case="E_iter_buffer_pyrandom_train_uses_it", kills=(5,))
def iterable_buffer_python_that_training_uses() -> None:
    """G3, G4"""
    data = DataLoader(Buffer(random.randrange), 4)
    with protect() as run:
        for _ in run.epochs(EPOCHS):
            for batch in run.batches(data):
                learn(batch)
                random.random()


@shape(warned="keeps samples back", kills=(280,), slow=True)
def iterable_buffer_for_too_long() -> None:
    """G3, G4"""
    train(DataLoader(Buffer(_torch_place, count=4 * 300), 4), epochs=1)


class Augmented(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        for number in range(4 * 300):
            yield number + float(torch.rand(()))


@shape(kills=(280,), slow=True)
def iterable_augmented_for_long() -> None:
    """Nothing waits in it: what was drawn for a sample went with it."""
    train(DataLoader(Augmented(), 4), epochs=1)


# ---- G5: torchdata's StatefulDataLoader --------------------------------------------------------------------


class Noisy(Dataset[float]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(())) + random.random()


def _stateful(dataset: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, **{"batch_size": 4, "shuffle": "sampler" not in options, **options})


@shape(case="E_L_sdl_w2_aug", kills=(5, 17, (3, 7)))
def stateful_workers_augmented() -> None:
    """G5"""
    train(_stateful(Noisy(), num_workers=2))


@shape(case="S_L_sdl_w2_aug", kills=(5, 17), slow=True)
def stateful_workers_augmented_steps() -> None:
    """G5"""
    train_steps(_stateful(Noisy(), num_workers=2))


@shape(case="E_L_sdl_own_epoch_sampler", warned="`sampler.ep` changes with every pass", kills=(5,))
def stateful_own_epochs() -> None:
    """G5"""
    train(_stateful(samples(), sampler=OwnEpochs()))
