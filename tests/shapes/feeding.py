"""Pipelines that data.md does not have: as people and libraries write them, to find out."""

from __future__ import annotations

import itertools
import math
import queue
import random
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from helpers.data.pipelines import BATCHES, forever, learn, loader, parts, protect, samples, shape
from shapes.holding import Numbers, _sampled, _stateful, train, train_steps
from shapes.loaders import KILLS, Noisy, noisy

COUNT = 4 * BATCHES


# ---- loaders of libraries ----------------------------------------------------------------------------------


class Repeat:
    """timm's _RepeatSampler."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class MultiEpochsDataLoader(DataLoader[Any]):
    """timm's: one iterator for all epochs, so that workers stay."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)  # type: ignore[assignment]
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


@shape(kills=KILLS, warned="made before the block")
def timm_multi_epochs() -> None:
    train(MultiEpochsDataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1))


@shape(kills=(5, BATCHES - 1, BATCHES + 5), warned="made before the block")
def timm_multi_epochs_without_workers() -> None:
    train(MultiEpochsDataLoader(samples(), batch_size=4, shuffle=True))


class PrefetchLoader:
    """timm's, without a device: one batch ahead, normalized."""

    def __init__(self, data: Any) -> None:
        self.loader = data
        self.mean = torch.tensor(3.0)

    def __iter__(self) -> Iterator[Any]:
        first, waiting = True, None
        for next_input in self.loader:
            next_input = next_input.float().sub(self.mean)
            if not first:
                yield waiting
            else:
                first = False
            waiting = next_input
        yield waiting

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def sampler(self) -> Any:
        return self.loader.sampler


@shape(kills=(0, 5, BATCHES - 2, BATCHES - 1, BATCHES + 5))
def timm_prefetch_loader() -> None:
    data = PrefetchLoader(noisy())
    with protect() as run:
        for _ in run.epochs(3):
            for i, batch in enumerate(run.batches(data)):
                learn(batch, scale=1.0 + i / len(data))


@shape(kills=(5, (8, BATCHES + 5)))
def wrapped_persistent_workers() -> None:
    """Its first pass starts the workers; the others find them there."""
    train(PrefetchLoader(noisy(num_workers=1, persistent_workers=True)), epochs=3)


@shape(kills=(5, BATCHES + 5, (5, BATCHES + 5)), slow=True)
def wrapped_persistent_workers_and_generator() -> None:
    own = torch.Generator().manual_seed(8)
    train(PrefetchLoader(noisy(num_workers=2, persistent_workers=True, generator=own)))


@shape(kills=(5, BATCHES + 5))
def wrapped_workers_and_generator() -> None:
    """The seed of the workers is drawn from the generator of the order, before it."""
    train(PrefetchLoader(noisy(num_workers=1, generator=torch.Generator().manual_seed(8))))


@shape(kills=(3, 4, 5, 6, (5, 11), 11))
def wrapped_left_early() -> None:
    """Stopped in the last step before the `break`, too."""
    data = PrefetchLoader(noisy())
    with protect() as run:
        for _ in run.epochs(3):
            for number, batch in enumerate(run.batches(data)):
                learn(batch)
                if number == 5:
                    break


@shape(kills=(4, 5, 6, 11))
def list_left_early() -> None:
    data = [torch.full((4,), float(number)) for number in range(BATCHES)]
    with protect() as run:
        for _ in run.epochs(3):
            for number, batch in enumerate(run.batches(data)):
                learn(batch)
                if number == 5:
                    break


@shape(kills=(3, 5, 8, 14), slow=True)
def wrapped_persistent_workers_left_early() -> None:
    data = PrefetchLoader(noisy(num_workers=1, persistent_workers=True))
    with protect() as run:
        for _ in run.epochs(3):
            for number, batch in enumerate(run.batches(data)):
                learn(batch)
                if number == 5:
                    break


@shape(kills=(5, 8, 14), slow=True)
def wrapped_persistent_workers_cut_short() -> None:
    data = noisy(num_workers=1, persistent_workers=True)
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(itertools.islice(data, 6)):
                learn(batch)


@shape(kills=(0, 5), warned="the generator `PrefetchLoader.__iter__`")
def timm_prefetch_loader_in_steps() -> None:
    """The generator carries a batch of the loader that was read ahead."""
    data = PrefetchLoader(noisy())
    with protect() as run:
        batches = forever(data)
        for _ in run.steps(30):
            learn(next(batches))


class InfiniteDataLoader(DataLoader[Any]):
    """As YOLO has it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not hasattr(self, "own"):
            self.own = super().__iter__()
        for _ in range(len(self)):
            yield next(self.own)


@shape(kills=(5, BATCHES - 1, BATCHES + 5), warned="`InfiniteDataLoader.__iter__`")
def yolo_infinite_loader() -> None:
    train(InfiniteDataLoader(samples(), batch_size=4, shuffle=True))


@shape(kills=KILLS, slow=True, warned="`InfiniteDataLoader.__iter__`")
def yolo_infinite_loader_workers() -> None:
    train(InfiniteDataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2))


class InfiniteSampler(Sampler[int]):
    """StyleGAN's: shuffles within a window, for ever, by a RandomState of the iterator's own."""

    def __init__(self, size: int, seed: int = 0, window: float = 0.5) -> None:
        self.size, self.seed, self.window = size, seed, window

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.size)
        rnd = np.random.RandomState(self.seed)
        rnd.shuffle(order)
        window = int(np.rint(order.size * self.window))
        for idx in itertools.count():
            i = idx % order.size
            yield int(order[i])
            j = (i - rnd.randint(window)) % order.size
            order[i], order[j] = order[j], order[i]


@shape(kills=(5, 20))
def stylegan_infinite_sampler() -> None:
    data = DataLoader(Noisy(), batch_size=4, sampler=InfiniteSampler(COUNT), num_workers=1)
    with protect(data=data) as run:
        batches = iter(data)
        for _ in run.steps(30):
            learn(next(batches))


@shape(kills=(5, BATCHES + 5))
def sampler_chained_for_ever() -> None:
    """torchvision's references: an endless chain of passes over one sampler, grouped by hand."""

    class Grouped(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            order = itertools.chain.from_iterable(itertools.repeat(RandomSampler(range(COUNT))))
            while True:
                yield list(itertools.islice(order, 4))

    train_steps(DataLoader(samples(), batch_sampler=Grouped()), 30)


class RASampler(Sampler[int]):
    """Repeated augmentation, as in DeiT."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([each for each in order for _ in range(3)][:COUNT])


@shape(kills=KILLS)
def repeated_augmentation() -> None:
    data = noisy(shuffle=False, sampler=RASampler(), num_workers=1, persistent_workers=True)
    with protect() as run:
        for epoch in run.epochs(3):
            data.sampler.set_epoch(epoch)
            for batch in run.batches(data):
                learn(batch)


# ---- streams -----------------------------------------------------------------------------------------------


class Uneven(IterableDataset[float]):
    """Shards of other sizes, dealt to the workers, shuffled anew in each epoch."""

    def __init__(self) -> None:
        self.shards = [list(range(100 * shard, 100 * shard + 3 + 5 * shard)) for shard in range(5)]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        shards = list(self.shards)
        random.Random(self.epoch).shuffle(shards)
        for shard in shards[info.id :: info.num_workers] if info else shards:
            order = list(shard)
            random.shuffle(order)
            for each in order:
                yield each + float(np.random.rand())


@shape(kills=(5, 16, 20))
def uneven_shards() -> None:
    dataset = Uneven()
    data = DataLoader(dataset, 4, num_workers=2)
    with protect() as run:
        for epoch in run.epochs(3):
            dataset.set_epoch(epoch)
            for batch in run.batches(data):
                learn(batch)


@shape(kills=(5, 20), slow=True)
def uneven_shards_persistent_dropped() -> None:
    train(DataLoader(Uneven(), 4, num_workers=2, persistent_workers=True, drop_last=True))


class Sequences(IterableDataset[Any]):
    """Yields whole batches: batch_size=None."""

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, COUNT, 4):
            yield {"x": torch.arange(start, start + 4) + torch.rand(4), "n": start}


@shape(kills=KILLS)
def batches_made_by_the_dataset() -> None:
    train(DataLoader(Sequences(), batch_size=None))


@shape(kills=KILLS)
def batches_made_by_a_map_dataset() -> None:
    """batch_size=None over indices of batches."""

    class Whole(Dataset[Any]):
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            return torch.arange(4.0) + 4 * index + torch.rand(())

    train(DataLoader(Whole(), batch_size=None, shuffle=True))


@shape(kills=KILLS)
def sampler_of_batches_as_sampler() -> None:
    """sampler=BatchSampler(...), batch_size=None: the dataset is given lists."""

    class Lists(Dataset[Any]):
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: Any) -> Any:
            return torch.tensor(index) + torch.rand(())

    train(DataLoader(Lists(), batch_size=None, sampler=BatchSampler(RandomSampler(range(COUNT)), 4, False)))


# ---- datasets and collate functions ------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """A numpy Generator that is made in the worker, from the worker's seed."""

    def __init__(self) -> None:
        self.rng: Any = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(info.seed if info else 7)
        return float(index + self.rng.normal())


@shape(kills=KILLS)
def numpy_generator_in_workers() -> None:
    train(loader(dataset=Augmented(), num_workers=2))


@shape(kills=KILLS)
def numpy_generator_made_late() -> None:
    train(loader(dataset=Augmented()))


class Mapped(Dataset[Any]):
    """A memmap that is opened at its first use, and again by each worker."""

    def __init__(self) -> None:
        self.path = tempfile.mkstemp()[1]
        np.arange(COUNT, dtype=np.float32).tofile(self.path)
        self.array: Any = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        if self.array is None:
            self.array = np.memmap(self.path, dtype=np.float32, mode="r")
        return float(self.array[index]) + random.random()


@shape(kills=KILLS)
def memmap_opened_lazily() -> None:
    train(loader(dataset=Mapped(), num_workers=1, persistent_workers=True))


class Opened(Dataset[Any]):
    """A file that is opened at its first use and sought in: as an HDF5 reader."""

    def __init__(self) -> None:
        self.path = tempfile.mkstemp()[1]
        with open(self.path, "w") as file:
            file.write("".join(f"{number:4d}" for number in range(COUNT)))
        self.file: Any = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        if self.file is None:
            self.file = open(self.path)
        self.file.seek(4 * index)
        return float(self.file.read(4)) + random.random()


@shape(kills=KILLS)
def file_opened_lazily() -> None:
    train(loader(dataset=Opened()))


def _padded(rows: list[Any]) -> torch.Tensor:
    longest = max(int(row[0]) % 5 + 1 for row in rows)
    out = torch.full((len(rows), longest), -1.0)
    for place, row in enumerate(rows):
        out[place, : int(row[0]) % 5 + 1] = row[0]
    if random.random() < 0.5:
        out = out.flip(0)
    return out


class ByLength(Sampler[list[int]]):
    """Buckets by length, the batches in an order of their own for each epoch."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)

    def __iter__(self) -> Iterator[list[int]]:
        buckets: dict[int, list[int]] = {}
        order = list(range(COUNT))
        self.rng.shuffle(order)
        for index in order:
            bucket = buckets.setdefault(index % 5, [])
            bucket.append(index)
            if len(bucket) == 4:
                yield buckets.pop(index % 5)
        for bucket in buckets.values():
            yield bucket


@shape(kills=(5, 13, 17))
def buckets_by_length_without_len() -> None:
    """A batch sampler without __len__."""
    train(DataLoader(ConcatDataset([samples(20), samples(28)]), batch_sampler=ByLength(), collate_fn=_padded))


@shape(kills=(5, 17), slow=True)
def buckets_by_length_workers() -> None:
    train(DataLoader(samples(), batch_sampler=ByLength(), collate_fn=_padded, num_workers=2))


class CollateMixup:
    """Mixes a batch with itself, by a Generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def __call__(self, rows: list[Any]) -> torch.Tensor:
        batch = torch.as_tensor(default_collate(rows)[0])
        weight = float(self.rng.beta(0.4, 0.4))
        return weight * batch + (1 - weight) * batch[torch.randperm(len(batch))]


@shape(kills=KILLS)
def mixup_in_collate() -> None:
    train(loader(collate_fn=CollateMixup()))


@shape(kills=KILLS, slow=True)
def mixup_in_collate_workers() -> None:
    train(loader(collate_fn=CollateMixup(), num_workers=2))


@shape(kills=KILLS)
def mixup_with_the_batch_before() -> None:
    data = noisy()
    with protect() as run:
        before = None
        for _ in run.epochs(3):
            for batch in run.batches(data):
                mixed = batch if before is None else 0.7 * batch + 0.3 * before
                learn(mixed)
                before = batch


# ---- samplers that know of training ------------------------------------------------------------------------


class LossSampler(Numbers):
    """The samples with the largest losses come twice."""

    def __init__(self) -> None:
        self.losses = dict.fromkeys(range(COUNT), 0.0)

    def update(self, indices: list[int], loss: float) -> None:
        for index in indices:
            self.losses[index] = 0.9 * self.losses[index] + loss

    def __iter__(self) -> Iterator[int]:
        hard = sorted(self.losses, key=lambda index: -self.losses[index])[: COUNT // 3]
        rest = [index for index in range(COUNT) if index not in hard][: COUNT // 3]
        order = hard * 2 + rest
        random.shuffle(order)
        return iter(order)


@shape(kills=(5, 11, 17))
def sampler_by_the_losses() -> None:
    sampler = LossSampler()
    data = _sampled(sampler)
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                sampler.update(batch[0].int().tolist(), learn(batch))


class Curriculum(Dataset[Any]):
    def __init__(self) -> None:
        self.difficulty = 1

    def set_difficulty(self, difficulty: int) -> None:
        self.difficulty = difficulty

    def __len__(self) -> int:
        return min(COUNT, 16 * self.difficulty)

    def __getitem__(self, index: int) -> float:
        return index * self.difficulty + random.random()


@shape(kills=(2, 6, 9))
def curriculum_by_the_epoch() -> None:
    dataset = Curriculum()
    data = loader(dataset=dataset)
    with protect() as run:
        for epoch in run.epochs(3):
            dataset.set_difficulty(epoch + 1)
            for batch in run.batches(data):
                learn(batch)


@shape(kills=(5, 17, 20))
def curriculum_by_the_step() -> None:
    """In the middle of a pass."""
    dataset = Curriculum()
    dataset.set_difficulty(3)
    data = loader(dataset=dataset)
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)
                if run.step % 7 == 0:
                    dataset.set_difficulty(3 + run.step // 7)


@shape(kills=KILLS)
def weights_by_a_generator() -> None:
    weights = [1.0 + number % 7 for number in range(COUNT)]
    train(
        _sampled(
            WeightedRandomSampler(weights, COUNT, generator=torch.Generator().manual_seed(3)), num_workers=1
        )
    )


@shape(kills=KILLS)
def distributed_sampler_that_drops() -> None:
    dataset = samples(2 * COUNT + 3)
    data = loader(dataset=dataset, shuffle=False, sampler=DistributedSampler(dataset, 2, 1, drop_last=True))
    with protect() as run:
        for epoch in run.epochs(2):
            data.sampler.set_epoch(epoch)
            for batch in run.batches(data):
                learn(batch)


# ---- loops -------------------------------------------------------------------------------------------------


@shape(kills=(3, 8), warned="itertools.cycle")
def shorter_loader_cycled() -> None:
    short, long = loader(dataset=samples(16)), loader()
    with protect(short=short, long=long) as run:
        others = itertools.cycle(short)
        for _ in run.epochs(2):
            for batch in run.batches(long):
                learn((batch, next(others)))


@shape(kills=(3, 5, BATCHES + 5))
def shorter_loader_renewed() -> None:
    short, long = noisy(batch_size=8), loader()
    with protect() as run:
        others = iter(short)
        for _ in run.epochs(3):
            for batch in run.batches(long):
                other = next(others, None)
                if other is None:
                    others = iter(short)
                    other = next(others)
                learn((batch, other))


@shape(kills=(3,), warned="itertools.zip_longest")
def longest_of_two() -> None:
    short, long = noisy(batch_size=8), loader()
    with protect() as run:
        for _ in run.epochs(2):
            for one, other in itertools.zip_longest(run.batches(long), short):
                learn(one if other is None else (one, other))


@shape(kills=(3, 8, 14, 17))
def batches_inside_batches() -> None:
    """Two loaders, one loop inside the other."""
    outer, inner = loader(batch_size=12), noisy(batch_size=16)
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(outer):
                learn(batch)
                for other in inner:
                    learn(other)


@shape(kills=(5, BATCHES - 1, BATCHES, BATCHES + 5))
def iterator_kept_over_epochs() -> None:
    """A fixed number of steps for each epoch, from one iterator: epochs of the loop and of the loader do not
    meet."""
    data = noisy()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.epochs(4):
            for _ in run.batches(range(7)):
                learn(next(batches))


@shape(kills=(4, 7, 9))
def generators_chained() -> None:
    """Warm-up on easy data, then the rest."""
    easy, hard = loader(dataset=samples(16)), noisy()
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(itertools.chain(easy, hard)):
                learn(batch)


@shape(kills=(2, 13), warned="itertools.chain()")
def generators_chained_in_steps() -> None:
    easy, hard = loader(dataset=samples(16)), noisy()
    with protect() as run:
        batches = itertools.chain(easy, forever(hard))
        for _ in run.steps(24):
            learn(next(batches))


@shape(kills=(5,), warned="another thread")
def queue_filled_by_a_thread() -> None:
    data = loader(generator=torch.Generator().manual_seed(1))
    waiting: queue.Queue[Any] = queue.Queue(4)

    def fill() -> None:
        for batch in itertools.islice(forever(data), 40):
            waiting.put(batch)

    with protect(data=data) as run:
        threading.Thread(target=fill, daemon=True).start()
        for _ in run.steps(20):
            learn(waiting.get())


@shape(kills=(5, BATCHES - 1, BATCHES + 5))
def mapped_and_filtered() -> None:
    data = noisy()
    with protect(data=data) as run:
        batches = filter(lambda batch: float(batch[0]) > 4, map(torch.abs, forever(data)))
        for _ in run.steps(24):
            learn(next(batches))


@shape(kills=(5, BATCHES + 5), warned="itertools.islice() with a step")
def rank_takes_every_second() -> None:
    data = noisy()
    with protect(data=data) as run:
        batches = itertools.islice(forever(data), 0, None, 2)
        for _ in run.steps(24):
            learn(next(batches))


@shape(kills=(1, 5, 9))
def replay_buffer() -> None:
    """Old batches are mixed with new ones."""
    data = noisy()
    old: list[Any] = []
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(24):
            batch = next(batches)
            chosen = random.choice(old) if old else batch
            learn((batch, chosen))
            old.append(batch)
            if len(old) > 5:
                old.pop(0)


@shape(kills=(3, 5))
def gradient_accumulation_over_uneven_windows() -> None:
    data = noisy(batch_size=2)
    _, optimizer = parts()
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(12):
            window = 1 + step % 3
            for place in range(window):
                learn(next(batches), update=place == window - 1, scale=1 / window)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 + math.cos(step / 12 * math.pi)) / 2


class StatefulOrder(Numbers):
    """torchdata's way: a sampler with state_dict()."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < COUNT:
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


@shape(kills=(5, BATCHES - 1, BATCHES + 5))
def stateful_sampler_with_state() -> None:
    train(_stateful(samples(), sampler=StatefulOrder()))


@shape(kills=(5, BATCHES - 1, BATCHES + 5))
def sampler_that_goes_on_by_itself() -> None:
    """The same in a plain DataLoader."""
    train(_sampled(StatefulOrder()))


@shape(kills=(0, BATCHES - 1, BATCHES, 2 * BATCHES - 1), slow=True)
def last_and_first_batch_of_an_epoch() -> None:
    train(noisy(num_workers=2, persistent_workers=True))


@shape(kills=(5, BATCHES + 5))
def order_of_the_script() -> None:
    """Indices that the script shuffles at the top of an epoch, and slices."""
    numbers = torch.arange(float(COUNT))
    with protect() as run:
        for _ in run.epochs(3):
            order = torch.randperm(COUNT)
            for start in run.batches(range(0, COUNT, 4)):
                learn(numbers[order[start : start + 4]])


@shape(kills=(5, BATCHES + 5))
def order_of_the_script_in_place() -> None:
    numbers = list(range(COUNT))
    with protect() as run:
        for _ in run.epochs(3):
            random.shuffle(numbers)
            for start in run.batches(range(0, COUNT, 4)):
                learn(torch.tensor(numbers[start : start + 4]).float())


@shape(kills=(5, BATCHES + 5))
def subset_sequential_by_hand() -> None:
    data = loader(shuffle=False, sampler=SequentialSampler(samples()))
    with protect(data=data) as run:
        it = iter(data)
        while run.step < 30:
            if (batch := next(it, None)) is None:
                it = iter(data)
                continue
            learn(batch)
            run.tick()
