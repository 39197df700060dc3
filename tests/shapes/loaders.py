"""torch's own DataLoader in its variants, as data.md has them: workers, samplers, streams, and loops around
several loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from helpers.data.pipelines import BATCHES, forever, learn, loader, parts, protect, samples, shape
from shapes.holding import Buffer, Numbers, StreamOwnRng, _sampled, _torch_place, train, train_steps

COUNT = 4 * BATCHES
KILLS = (5, BATCHES + 5)


class Noisy(Dataset[float]):
    """Changed at random by all three generators when it is read."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(())) * 0.5 + random.random() * 0.1 + float(np.random.rand()) * 0.01


def noisy(**options: Any) -> Any:
    return loader(dataset=Noisy(), **options)


# ---- workers and sizes -------------------------------------------------------------------------------------


@shape(case=("E_w0_shuffle", "E_w0_nohand"))
def no_workers() -> None:
    train(noisy())


@shape(case="E_w2_shuffle", kills=(5, BATCHES - 1, (5, BATCHES + 5)))
def two_workers() -> None:
    train(noisy(num_workers=2))


@shape(case="E_w2_persist_pf4", kills=(5, BATCHES - 1, BATCHES + 5, (5, BATCHES + 5)), slow=True)
def persistent_workers() -> None:
    train(noisy(num_workers=2, persistent_workers=True, prefetch_factor=4))


@shape(case="S_w2_persist_pf4", slow=True)
def persistent_workers_steps() -> None:
    train_steps(noisy(num_workers=2, persistent_workers=True, prefetch_factor=4))


@shape(case="E_w2_timeout_pin_gen", slow=True)
def timeout_pinned_and_a_generator() -> None:
    train(
        noisy(
            num_workers=2,
            timeout=30,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(5),
        )
    )


@shape(case="E_w0_n50_keep", kills=(5, BATCHES, BATCHES + 5))
def last_batch_is_smaller() -> None:
    train(loader(dataset=samples(50)))


@shape(case="E_w2_n50_droplast", slow=True)
def last_batch_is_dropped() -> None:
    train(loader(dataset=samples(50), num_workers=2, drop_last=True))


@shape(case="E_w1_spawn", kills=(3,), slow=True)
def spawned_worker() -> None:
    train(noisy(num_workers=1, multiprocessing_context="spawn"), epochs=1)


@shape(case="E_w1_forkserver", kills=(3,), slow=True)
def worker_of_a_forkserver() -> None:
    train(noisy(num_workers=1, multiprocessing_context="forkserver"), epochs=1)


@shape(case="E_w2_inorderFalse", warned="in_order=False", kills=(5,), repeatable=False)
def out_of_order() -> None:
    train(noisy(num_workers=2, in_order=False))


def _seeded(worker: int) -> None:
    random.seed(worker)
    np.random.seed(worker)
    torch.manual_seed(worker)


@shape(case="E_winit_seed_w2", kills=KILLS, slow=True)
def workers_seeded_by_number() -> None:
    train(noisy(num_workers=2, worker_init_fn=_seeded))


@shape(case="E_winit_seed_w2_persist", kills=KILLS)
def persistent_workers_seeded_by_number() -> None:
    train(noisy(num_workers=2, worker_init_fn=_seeded, persistent_workers=True))


def _random_collate(rows: list[Any]) -> torch.Tensor:
    """Padded to a length drawn at random, and mixed up."""
    batch: torch.Tensor = default_collate(rows).double()
    batch = torch.cat([batch, torch.zeros(random.randrange(3), dtype=batch.dtype)])
    return batch[torch.randperm(len(batch))] * float(np.random.rand())


@shape(case="E_collate_random_w0", kills=KILLS)
def random_collate() -> None:
    train(noisy(collate_fn=_random_collate))


@shape(case="E_collate_random_w2", kills=KILLS, slow=True)
def random_collate_workers() -> None:
    train(noisy(collate_fn=_random_collate, num_workers=2))


# ---- samplers ----------------------------------------------------------------------------------------------


@shape(case="E_replacement", kills=KILLS)
def with_replacement() -> None:
    train(_sampled(RandomSampler(samples(), replacement=True)))


@shape(case="E_replacement100", kills=(5, 24, 30))
def more_with_replacement() -> None:
    """torch draws these in portions of 32."""
    train(_sampled(RandomSampler(samples(), replacement=True, num_samples=100)))


@shape(case="E_weighted", kills=KILLS)
def weighted() -> None:
    train(_sampled(WeightedRandomSampler([1.0 + number % 5 for number in range(COUNT)], COUNT)))


@shape(case="E_subsetrandom")
def subset_at_random() -> None:
    train(_sampled(SubsetRandomSampler(range(0, 2 * COUNT, 2)), dataset=samples(2 * COUNT)))


@shape(case="E_subset_concat_tensor", kills=KILLS)
def subsets_joined() -> None:
    train(
        loader(dataset=ConcatDataset([Subset(samples(), range(20)), Subset(samples(200), range(100, 128))]))
    )


class Bucketed(Sampler[list[int]]):
    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(COUNT), key=lambda number: (number % 3, random.random()))
        batches = [order[start : start + 4] for start in range(0, COUNT, 4)]
        random.shuffle(batches)
        yield from batches


@shape(case="E_batchsampler_globalrandom", kills=KILLS)
def batch_sampler_of_python() -> None:
    train(DataLoader(Noisy(), batch_sampler=Bucketed()))


@shape(case="S_batchsampler_globalrandom")
def batch_sampler_of_python_steps() -> None:
    train_steps(DataLoader(Noisy(), batch_sampler=Bucketed()))


class NumpyRng(Numbers):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(8)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(COUNT).tolist())


class NumpyRngLazy(NumpyRng):
    def __iter__(self) -> Iterator[int]:
        for start in range(0, COUNT, 8):
            yield from (start + self.rng.permutation(8)).tolist()


@shape(case="E_sampler_np_rng_attr", kills=KILLS)
def sampler_with_numpy() -> None:
    train(_sampled(NumpyRng()))


@shape(case="E_sampler_np_rng_lazy", kills=(5, 8, BATCHES + 5))
def sampler_with_numpy_lazily() -> None:
    train(_sampled(NumpyRngLazy()))


def _distributed() -> Any:
    return loader(dataset=Noisy(), shuffle=False, sampler=DistributedSampler(Noisy(), 1, 0, seed=3))


@shape(case="E_sampler_set_epoch", kills=KILLS)
def set_epoch() -> None:
    data = _distributed()
    with protect() as run:
        for epoch in run.epochs(3):
            data.sampler.set_epoch(epoch)
            for batch in run.batches(data):
                learn(batch)


def _epochs_by_hand(data: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        data.sampler.set_epoch(epoch)
        yield from data
        epoch += 1


@shape(case="S_dist_set_epoch_by_hand", kills=(5, BATCHES + 5), warned="`epoch`")
def set_epoch_by_hand_in_a_generator() -> None:
    data = _distributed()
    with protect(data=data) as run:
        batches = _epochs_by_hand(data)
        for _ in run.steps(3 * BATCHES):
            learn(next(batches))


@shape(
    case="S_dist_set_epoch_by_hand", kills=(5, BATCHES - 1, BATCHES + 5, (5, BATCHES + 5, 2 * BATCHES + 1))
)
def set_epoch_by_hand() -> None:
    """In the loop itself the counter is a variable that the loop carries."""
    data = _distributed()
    with protect(data=data) as run:
        epoch = 0
        data.sampler.set_epoch(epoch)
        batches = iter(data)
        for _ in run.steps(3 * BATCHES):
            try:
                batch = next(batches)
            except StopIteration:
                epoch += 1
                data.sampler.set_epoch(epoch)
                batches = iter(data)
                batch = next(batches)
            learn(batch)


# ---- streams -----------------------------------------------------------------------------------------------


class Lines(IterableDataset[float]):
    """In order; each worker takes its share."""

    def __init__(self, start: int = 0, stop: int = COUNT) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        yield from map(
            float, range(self.start + (info.id if info else 0), self.stop, info.num_workers if info else 1)
        )


class Shuffled(Lines):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        numbers = list(super().__iter__())
        random.Random(self.epoch).shuffle(numbers)
        yield from numbers


class Endless(Lines):
    def __iter__(self) -> Iterator[float]:
        while True:
            for number in super().__iter__():
                yield number + float(torch.rand(()))


class PackedStream(Lines):
    """Samples of three numbers each, joined from shorter ones."""

    def __iter__(self) -> Any:
        waiting: list[float] = []
        for number in super().__iter__():
            waiting += [number] * (1 + int(number) % 3)
            while len(waiting) >= 3:
                yield torch.tensor(waiting[:3])
                del waiting[:3]


@shape(case="E_iter_w0", kills=KILLS)
def stream() -> None:
    train(DataLoader(Lines(), 4))


@shape(case="E_iter_shard_w2")
def stream_in_shares() -> None:
    train(DataLoader(Lines(0, 50), 4, num_workers=2))


@shape(case="E_iter_ChainDataset_w2", kills=KILLS, slow=True)
def streams_chained() -> None:
    train(DataLoader(ChainDataset([Lines(0, 20), Shuffled(20, 48)]), 4, num_workers=2))


@shape(case="E_iter_set_epoch_w0", kills=KILLS)
def stream_set_epoch() -> None:
    dataset = Shuffled()
    data = DataLoader(dataset, 4)
    with protect() as run:
        for epoch in run.epochs(3):
            dataset.set_epoch(epoch)
            for batch in run.batches(data):
                learn(batch)


@shape(case="E_iter_buffer_globalrandom_w2", kills=KILLS)
def stream_with_a_buffer_workers() -> None:
    train(DataLoader(Buffer(random.randrange, lambda: float(torch.rand(()))), 4, num_workers=2), epochs=1)


@shape(case="E_iter_buffer_torchglobal_w2", kills=KILLS, slow=True)
def stream_with_a_buffer_of_torch_workers() -> None:
    train(DataLoader(Buffer(_torch_place), 4, num_workers=2), epochs=1)


@shape(case="E_iter_own_rng_attr_w2_persist", kills=(5, 25, 29), slow=True)
def stream_with_its_own_rng_in_persistent_workers() -> None:
    train(DataLoader(StreamOwnRng(), 4, num_workers=2, persistent_workers=True), epochs=2)


@shape(case="S_iter_infinite_w0")
def endless_stream() -> None:
    train_steps(DataLoader(Endless(), 4), 30)


@shape(case="S_iter_infinite_w2", kills=KILLS)
def endless_stream_workers() -> None:
    train_steps(DataLoader(Endless(), 4, num_workers=2), 30)


@shape(case="X_packed_dataset_iterable")
def packed_in_the_dataset() -> None:
    train(DataLoader(PackedStream(), 4))


# ---- loops around several loaders --------------------------------------------------------------------------


@shape(case="X_alternating")
def alternating() -> None:
    first, second = noisy(), loader()
    with protect(first=first, second=second) as run:
        ones, others = forever(first), forever(second)
        for step in run.steps(30):
            learn(next(others if step % 3 == 2 else ones))


@shape(case="X_epochs_inner_next_second")
def second_loader_by_next() -> None:
    first, second = loader(), noisy()
    with protect(second=second) as run:
        others = forever(second)
        for _ in run.epochs(3):
            for batch in run.batches(first):
                learn((batch, next(others)))


@shape(case="X_epochs_zip_batches_both")
def batches_of_two_in_zip() -> None:
    first, second = loader(), noisy()
    with protect() as run:
        for _ in run.epochs(3):
            for pair in zip(run.batches(first), run.batches(second), strict=True):
                learn(pair)


@shape(case="X_epochs_zip_batches_first")
def batches_first_in_zip() -> None:
    labelled, unlabelled = loader(), noisy()
    with protect(unlabelled=unlabelled) as run:
        for _ in run.epochs(3):
            for pair in zip(run.batches(labelled), unlabelled, strict=False):
                learn(pair)


@shape(case="X_steps_zip_run_first")
def steps_first_in_zip() -> None:
    data = noisy()
    with protect(data=data) as run:
        for _, batch in zip(run.steps(30), forever(data), strict=False):
            learn(batch)


@shape(case="Z_batches_not_handed_two_loaders_conditional", kills=(5, 11, 17, 23))
def another_loader_every_other_epoch() -> None:
    first, second = noisy(), loader()
    with protect() as run:
        for epoch in run.epochs(3):
            for batch in run.batches(second if epoch % 2 else first):
                learn(batch)


@shape(case="X_chunked_accum")
def windows_of_three() -> None:
    data = noisy()
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch, update=run.batch % 3 == 2)


@shape(case="X_tick_for_loop", kills=(5, 9))
def tick_in_a_plain_loop() -> None:
    data = noisy()
    with protect(data=data) as run:
        for batch in data:
            learn(batch)
            run.tick()


@shape(case="X_loader_recreated_each_epoch")
def loader_made_in_each_epoch() -> None:
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(noisy()):
                learn(batch)


@shape(case="X_loader_recreated_generator_top")
def loader_made_with_a_generator_in_each_epoch() -> None:
    with protect() as run:
        for epoch in run.epochs(3):
            for batch in run.batches(loader(generator=torch.Generator().manual_seed(epoch))):
                learn(batch)


@shape(case="X_curriculum_batchsize_per_epoch", kills=(5, 11, 20))
def batch_size_of_the_epoch() -> None:
    with protect() as run:
        for epoch in run.epochs(3):
            for batch in run.batches(loader(batch_size=2 + 2 * epoch)):
                learn(batch)


class Module:
    """As Lightning has them."""

    def setup(self) -> None:
        self.train_set, self.val_set = samples(), samples(16)

    def train_dataloader(self) -> Any:
        return loader(dataset=self.train_set)

    def val_dataloader(self) -> Any:
        return loader(dataset=self.val_set, shuffle=False)


@shape(case="X_datamodule")
def datamodule() -> None:
    module = Module()
    module.setup()
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(module.train_dataloader()):
                learn(batch)
            judge(module.val_dataloader())


def judge(data: Any) -> float:
    model, _ = parts()
    model.eval()
    with torch.no_grad():
        total = sum(
            float(model(batch[0] if isinstance(batch, list) else batch.float()).sum()) for batch in data
        )
    model.train()
    return total


@shape(case="X_eval_same_dataset_every5")
def validation_on_the_same_dataset() -> None:
    data = noisy()
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)
                if run.step % 5 == 0:
                    judge(loader(dataset=data.dataset))


@shape(case="X_eval_same_loader_inside")
def validation_on_the_same_loader() -> None:
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)
                if run.batch == 6:
                    judge(data)


@shape(case="X_eval_end_persistent_batches", slow=True)
def validation_with_persistent_workers() -> None:
    data, held_out = noisy(), noisy(num_workers=1, persistent_workers=True)
    with protect(held_out=held_out) as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)
            learn(torch.tensor([judge(held_out) / 1000]), update=False)


@shape(case="X_eval_persistent_not_handed", kills=(5, 12, 18), slow=True)
def validation_that_feeds_training() -> None:
    """What persistent workers of a loader that nobody handed over have drawn goes into the next learning
    rate."""
    data, held_out = noisy(), noisy(num_workers=1, persistent_workers=True)
    with protect() as run:
        scale = 1.0
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch, scale=scale)
            scale = 1.0 + sum(float(batch.sum()) for batch in held_out) / 10_000


@shape(case="X_unseeded_shuffle", seeded=False)
def unseeded() -> None:
    train(loader())


@shape(case="X_steps_generator_made_before_protect")
def generator_made_before_the_block() -> None:
    data = noisy()
    batches = forever(data)
    with protect(data=data) as run:
        for _ in run.steps(30):
            learn(next(batches))


class Renewing:
    def __init__(self, data: Any) -> None:
        self.data = data
        self.it: Any = None

    def get(self) -> Any:
        try:
            return next(self.it)
        except (StopIteration, TypeError):
            self.it = iter(self.data)
            return next(self.it)


@shape(case="X_steps_generator_renew", kills=(5, BATCHES + 5))
def iterator_made_anew() -> None:
    """Not stopped at the end of a pass: there the resumed iterator begins at its end, which this script does
    not expect of one that it has just made (docs/exact.md)."""
    data = noisy()
    with protect(data=data) as run:
        source = Renewing(data)
        for _ in run.steps(30):
            learn(source.get())


@shape(case="X_islice_persistent_break", kills=(5, 6, 7, 12), slow=True)
def some_batches_of_persistent_workers() -> None:
    data = noisy(num_workers=2, persistent_workers=True)
    with protect() as run:
        for _ in run.epochs(3):
            for i, batch in enumerate(run.batches(data)):
                if i >= 7:
                    break
                learn(batch)


@shape(case="X_subset_random_per_epoch")
def subset_drawn_in_each_epoch() -> None:
    whole = samples(2 * COUNT)
    with protect() as run:
        for _ in run.epochs(3):
            chosen = torch.randperm(2 * COUNT)[:COUNT].tolist()
            for batch in run.batches(loader(dataset=Subset(whole, chosen))):
                learn(batch)


class Files(Dataset[float]):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> float:
        return float(self.names[index].partition(".")[0])


@shape(case="X_unseeded_random_shuffled_filelist", seeded=False)
def unseeded_order_of_files() -> None:
    names = [f"{number}.jpg" for number in range(COUNT)]
    random.shuffle(names)
    train(loader(dataset=Files(names), shuffle=False))


@shape(case="X_memmap_own_rng_not_handed")
def windows_by_a_generator_of_its_own() -> None:
    tokens, rng = np.arange(1000.0), np.random.default_rng(6)
    with protect() as run:
        for _ in run.steps(30):
            start = int(rng.integers(990))
            learn(torch.from_numpy(tokens[start : start + 4]))


@shape(case="X_memmap_own_rng_handed")
def windows_by_a_generator_that_is_handed_over() -> None:
    tokens, rng = np.arange(1000.0), torch.Generator().manual_seed(6)
    with protect(rng=rng) as run:
        for _ in run.steps(30):
            start = int(torch.randint(990, (), generator=rng))
            learn(torch.from_numpy(tokens[start : start + 4]))


@shape(case="X_memmap_get_batch")
def windows_of_a_file(tmp: str = "tokens.bin") -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp)

    def get_batch() -> torch.Tensor:
        tokens = np.memmap(tmp, dtype=np.uint16, mode="r")
        places = torch.randint(990, (2,)).tolist()
        return torch.stack([torch.from_numpy(tokens[place : place + 4].astype(np.int64)) for place in places])

    with protect() as run:
        for _ in run.steps(30):
            learn(get_batch())


class Packer:
    """Keeps what is left of a batch for the next one."""

    def __init__(self, data: Any) -> None:
        self.source = forever(data)
        self.left: list[Any] = []

    def get(self) -> torch.Tensor:
        while len(self.left) < 6:
            self.left.extend(next(self.source)[0])
        batch, self.left = torch.stack(self.left[:6]), self.left[6:]
        return batch


@shape(case="Z_mid_batch_state_in_user_object", kills=(3, 7, 8, 12))
def object_that_keeps_what_is_left() -> None:
    data = loader()
    packer = Packer(data)
    with protect(data=data) as run:
        for _ in run.steps(20):
            learn(packer.get())


@shape(case="X_wrapper_class_inner_handed_steps")
def wrapper_around_what_is_handed_over() -> None:
    data = noisy()

    class Wrapper:
        def __iter__(self) -> Iterator[Any]:
            for batch in data:
                yield batch.float()

    with protect(data=data) as run:
        batches = forever(Wrapper())
        for _ in run.steps(30):
            learn(next(batches))


@shape(case="X_epochs_apex_prefetcher_tick", kills=(1, 5, 10, 11, 12, 17))
def prefetcher_in_epochs_with_ticks() -> None:
    from shapes.consuming import Apex

    data = noisy()
    with protect(data=data) as run:
        for _ in run.epochs(3):
            prefetcher = Apex(data)
            while (batch := prefetcher.next()) is not None:
                learn(batch)
                run.tick()


@shape(case="X_get_batch_ahead_nanogpt")
def next_window_is_fetched_first() -> None:
    def get_batch() -> torch.Tensor:
        return torch.randint(1000, (4,))

    with protect() as run:
        following = get_batch()
        for _ in run.steps(30):
            batch, following = following, get_batch()
            learn(batch)
