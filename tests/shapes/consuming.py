"""How a loop consumes its data: what lies between the loader and the step."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from typing import Any

import numpy as np
import torch
import torchdata.nodes
from tqdm import tqdm

from helpers.data.pipelines import BATCHES, forever, learn, loader, parts, protect, samples, shape

STEPS = 2 * BATCHES + 6


@shape()
def plain_steps() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape(kills=(5, BATCHES - 1, (5, BATCHES + 5)))
def plain_epochs() -> None:
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)


# ---- peeks -------------------------------------------------------------------------------------------------


@shape(kills=(5, BATCHES - 1, BATCHES + 5, (3, BATCHES + 2)))
def a1_peek_at_the_top_of_an_epoch() -> None:
    """A1: the batch-size peek of PyTorch's DDP tutorial."""
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(3):
            size = len(next(iter(data))[0])
            assert size == 4
            for batch in run.batches(data):
                learn(batch)


@shape()
def a1_peek_not_handed_over() -> None:
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            assert len(next(iter(data))[0]) == 4
            for batch in run.batches(data):
                learn(batch)


@shape()
def a7_peek_before_steps() -> None:
    """A7"""
    data = loader()
    with protect(data=data) as run:
        first = next(iter(data))
        assert len(first[0]) == 4
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape()
def a7_peek_before_steps_and_an_iterator_before() -> None:
    """A7: with a generator of the loader's own, which a peek moves."""
    data = loader(generator=torch.Generator().manual_seed(5))
    with protect(data=data) as run:
        assert len(next(iter(data))[0]) == 4
        it = iter(data)
        for _ in run.steps(STEPS):
            try:
                batch = next(it)
            except StopIteration:
                it = iter(data)
                batch = next(it)
            learn(batch)


@shape()
def a7_peek_kept_before_steps() -> None:
    data = loader()
    with protect(data=data) as run:
        kept = iter(data)
        first = next(kept)
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))
        assert len(first[0]) == 4


@shape()
def a7_statistics_before_steps() -> None:
    """A whole pass before the loop, at the same loader."""
    data = loader()
    with protect(data=data) as run:
        mean = sum(float(x.sum()) for (x,) in data) / 48
        assert mean == 23.5
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape()
def a7_peek_through_the_same_generator() -> None:
    data = loader()
    with protect(data=data) as run:
        assert len(next(forever(data))[0]) == 4
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape()
def a7_peek_with_persistent_workers() -> None:
    data = loader(num_workers=2, persistent_workers=True)
    with protect(data=data) as run:
        assert len(next(iter(data))[0]) == 4
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape(kills=(5, 8))
def a7_peek_before_ticks() -> None:
    data = loader()
    with protect(data=data) as run:
        assert len(next(iter(data))[0]) == 4
        for batch in data:
            learn(batch)
            run.tick()


@shape()
def peek_in_every_step() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            assert len(next(iter(data))[0]) == 4
            learn(next(batches))


@shape(case="X_next_iter_each_step")
def next_iter_in_every_step() -> None:
    data = loader()
    with protect(data=data) as run:
        for _ in run.steps(STEPS):
            learn(next(iter(data)))


@shape()
def second_pass_inside_an_epoch() -> None:
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)
                if run.batch % 5 == 2:
                    assert sum(len(x) for (x,) in data) == 48


# ---- read ahead --------------------------------------------------------------------------------------------


class Apex:
    """The prefetcher of NVIDIA's examples, without streams."""

    def __init__(self, data: Any) -> None:
        self.loader = iter(data)
        self.preload()

    def preload(self) -> None:
        try:
            self.batch = next(self.loader)
        except StopIteration:
            self.batch = None

    def next(self) -> Any:
        batch = self.batch
        self.preload()
        return batch


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that are changed at random when they are read."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(()) * 0.5 + random.random() * 0.1 + np.random.rand() * 0.01


@shape(case="X_steps_apex_prefetcher", kills=(0, 1, 2, 5, BATCHES - 1, BATCHES, BATCHES + 5))
def g2_apex_prefetcher_in_steps() -> None:
    """G2"""
    data = loader()
    with protect(data=data) as run:
        prefetcher = Apex(data)
        for _ in run.steps(STEPS):
            batch = prefetcher.next()
            if batch is None:
                prefetcher = Apex(data)
                batch = prefetcher.next()
            learn(batch)


@shape(kills=(5, BATCHES - 1, BATCHES + 5, (4, BATCHES + 2)))
def g2_apex_prefetcher_with_augmentation() -> None:
    data = loader(dataset=Noisy())
    with protect(data=data) as run:
        prefetcher = Apex(data)
        for _ in run.steps(STEPS):
            batch = prefetcher.next()
            if batch is None:
                prefetcher = Apex(data)
                batch = prefetcher.next()
            learn(batch)


@shape()
def g2_apex_prefetcher_with_workers() -> None:
    data = loader(dataset=Noisy(), num_workers=2)
    with protect(data=data) as run:
        prefetcher = Apex(data)
        for _ in run.steps(STEPS):
            batch = prefetcher.next()
            if batch is None:
                prefetcher = Apex(data)
                batch = prefetcher.next()
            learn(batch)


class Device(Apex):
    """What it has read ahead lies on a device: other tensors than those that the loader has delivered."""

    def preload(self) -> None:
        super().preload()
        if self.batch is not None:
            self.batch = [each.double() for each in self.batch]


@shape(kills=(1, 5, BATCHES - 1, BATCHES, BATCHES + 5))
def g2_apex_prefetcher_to_a_device() -> None:
    data = loader()
    with protect(data=data) as run:
        prefetcher = Device(data)
        for _ in run.steps(STEPS):
            batch = prefetcher.next()
            if batch is None:
                prefetcher = Device(data)
                batch = prefetcher.next()
            learn([each.float() for each in batch])


@shape(kills=(1, 5, 9))
def g2_apex_prefetcher_with_ticks() -> None:
    data = loader()
    with protect(data=data) as run:
        prefetcher = Apex(data)
        batch = prefetcher.next()
        while batch is not None:
            learn(batch)
            run.tick()
            batch = prefetcher.next()


@shape()
def g2_apex_prefetcher_made_in_a_generator() -> None:
    data = loader(dataset=Noisy())

    def batches() -> Any:
        while True:
            prefetcher = Apex(data)
            while (batch := prefetcher.next()) is not None:
                yield batch

    with protect(data=data) as run:
        source = batches()
        for _ in run.steps(STEPS):
            learn(next(source))


@shape(case="X_epochs_apex_prefetcher_over_batches")
def g2_apex_prefetcher_over_batches() -> None:
    data = loader(dataset=Noisy())
    with protect() as run:
        for _ in run.epochs(3):
            prefetcher = Apex(run.batches(data))
            batch = prefetcher.next()
            while batch is not None:
                learn(batch)
                batch = prefetcher.next()


@shape(case="X_steps_lookahead", kills=(0, 1, 2, 5, BATCHES - 1, BATCHES, BATCHES + 5))
def g2_look_ahead_in_steps() -> None:
    data = loader(dataset=Noisy())
    with protect(data=data) as run:
        batches = forever(data)
        following = next(batches)
        for _ in run.steps(STEPS):
            batch, following = following, next(batches)
            learn(batch)


@shape(kills=(1, 5, BATCHES - 2, BATCHES - 1, BATCHES, BATCHES + 5, (BATCHES - 1, BATCHES + 5)))
def g2_look_ahead_that_sees_the_end() -> None:
    """G2: `following` is None at the end of an epoch."""
    data = loader(dataset=Noisy())
    with protect(data=data) as run:
        it = iter(data)
        following = next(it, None)
        for _ in run.steps(STEPS):
            if following is None:
                it = iter(data)
                following = next(it, None)
            batch, following = following, next(it, None)
            learn(batch)


@shape(kills=(1, 5, BATCHES - 1, BATCHES, BATCHES + 5))
def g2_three_batches_in_a_row() -> None:
    """What was trained is used once more by the next step."""
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        current, following = next(batches), next(batches)
        for _ in run.steps(STEPS):
            former, current, following = current, following, next(batches)
            learn(current, scale=1.0 + float(former[0].sum()) / 1000)


@shape(kills=(1, 5, BATCHES - 1, BATCHES, BATCHES + 5))
def g2_former_batch() -> None:
    """Nothing is read ahead: the former batch is for the loop's variables."""
    data = loader()
    with protect(data=data) as run:
        batches, former = forever(data), None
        for _ in run.steps(STEPS):
            batch = next(batches)
            learn(batch, scale=1.0 if former is None else 1.0 + float(former[0].sum()) / 1000)
            former = batch


@shape(kills=(2, 5, 8))
def g2_apex_prefetcher_with_ticks_last() -> None:
    data = loader()
    with protect(data=data) as run:
        prefetcher = Apex(data)
        batch = prefetcher.next()
        while batch is not None:
            learn(batch)
            batch = prefetcher.next()
            run.tick()


@shape(case="X_epochs_lookahead_over_batches")
def g2_look_ahead_over_batches() -> None:
    data = loader(dataset=Noisy())
    with protect() as run:
        for _ in run.epochs(3):
            batches = run.batches(data)
            following = next(batches, None)
            while following is not None:
                batch, following = following, next(batches, None)
                learn(batch)


@shape()
def g2_warm_up_batch_is_dropped() -> None:
    data = loader(dataset=Noisy())
    with protect(data=data) as run:
        batches = forever(data)
        next(batches)
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape(case="X_steps_zip_run_last", kills=(0, 5, 9))
def g2_zip_with_steps_last() -> None:
    data = loader(dataset=Noisy())
    with protect(data=data) as run:
        for batch, _ in zip(data, run.steps(STEPS), strict=False):
            learn(batch)


@shape(case="X_epochs_zip_batches_last")
def g2_zip_with_batches_last() -> None:
    unlabelled, labelled = loader(dataset=Noisy()), loader(dataset=Noisy())
    with protect(unlabelled=unlabelled) as run:
        for _ in run.epochs(3):
            for other, batch in zip(unlabelled, run.batches(labelled), strict=False):
                learn((other, batch))


@shape()
def g2_bad_batches_are_skipped() -> None:
    """More draws in the first step than in the next ones, and nothing is held."""
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(STEPS):
            batch = next(batches)
            while step in (0, 7) and batch is not None:
                batch = next(batches)
                break
            learn(batch)


@shape()
def g2_accumulation_in_steps() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(STEPS // 3):
            for number in range(3):
                learn(next(batches), update=number == 2)


# ---- loaders that nobody handed over -----------------------------------------------------------------------


@shape(case="S_w0_nohand")
def g9_loader_not_handed_over() -> None:
    """G9"""
    data = loader(dataset=Noisy())
    with protect() as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape()
def g9_loader_with_a_generator_not_handed_over() -> None:
    data = loader(generator=torch.Generator().manual_seed(3), num_workers=2, dataset=Noisy())
    with protect() as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


class Wrapper:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        for batch in self.data:  # noqa: UP028
            yield batch


@shape(case="X_wrapper_not_handed_steps")
def g9_wrapper_not_handed_over() -> None:
    data = Wrapper(loader())
    with protect() as run:
        batches = forever(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


class Module:
    def train_dataloader(self) -> Any:
        return loader()

    def batches(self) -> Any:
        while True:
            yield from self.train_dataloader()


@shape(case="X_steps_datamodule_fresh_loader_each_pass")
def g9_datamodule_with_a_fresh_loader_for_each_pass() -> None:
    module = Module()
    with protect() as run:
        batches = module.batches()
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape(case="X_epochs_zip_second_not_handed")
def g9_second_loader_in_zip() -> None:
    first, second = loader(), loader(dataset=Noisy())
    with protect() as run:
        for _ in run.epochs(3):
            for batch, other in zip(run.batches(first), second, strict=True):
                learn((batch, other))


@shape()
def g9_two_loaders_through_one_generator() -> None:
    first, second = loader(), loader()
    with protect() as run:
        ones, others = forever(first), forever(second)
        for step in run.steps(STEPS):
            learn((next(ones), next(others)) if step % 2 else next(ones))


@shape()
def g9_validation_loader() -> None:
    data, held_out = loader(), loader(dataset=samples(20))
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(STEPS):
            learn(next(batches))
            if step % 5 == 4:
                model, _ = parts()
                model.eval()
                with torch.no_grad():
                    for (x,) in held_out:
                        model(x)
                model.train()


@shape(case=("X_steps_iter_made_before_protect", "Z_iter_before_with"))
def g9_iterator_made_before_the_block() -> None:
    """G9, F3"""
    data = loader()
    it = iter(data)
    with protect(data=data) as run:
        for _ in run.steps(STEPS):
            try:
                batch = next(it)
            except StopIteration:
                it = iter(data)
                batch = next(it)
            learn(batch)


@shape(warned="made before the block", kills=(5,))
def f3_iterator_with_workers_made_before_the_block() -> None:
    data = loader(num_workers=1)
    it = iter(data)
    with protect(data=data) as run:
        for _ in run.steps(8):
            learn(next(it))


# ---- run.batches() over anything ---------------------------------------------------------------------------


@shape(kills=(5, BATCHES - 1, (5, BATCHES + 5)))
def e9_batches_of_a_range() -> None:
    """E9"""
    with protect() as run:
        for _ in run.epochs(3):
            assert len(run.batches(range(BATCHES))) == BATCHES
            for number in run.batches(range(BATCHES)):
                learn(torch.randint(0, 48, (4,)) + number)


@shape()
def e9_batches_of_a_list() -> None:
    batches = list(torch.randperm(48).split(4))
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(batches):
                learn(batch)


@shape(case="X_tqdm_inside_batches")
def e9_batches_of_tqdm() -> None:
    data = loader(dataset=Noisy())
    with protect(data=data) as run:
        for _ in run.epochs(3):
            assert len(run.batches(data)) == BATCHES
            for batch in run.batches(tqdm(data, disable=True)):
                learn(batch)


@shape(kills=(5, BATCHES - 1, (5, BATCHES + 5)))
def e9_batches_of_a_wrapper() -> None:
    data = Wrapper(loader(dataset=Noisy()))
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)


@shape()
def e9_batches_of_zip_and_islice() -> None:
    first, second = loader(dataset=Noisy()), loader(num_workers=2, dataset=Noisy())
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(itertools.islice(zip(first, second, strict=True), 10)):
                learn(batch)


def packed(data: Any) -> Any:
    """Batches of 6 from batches of 4: what is left over waits in a list."""
    left: list[Any] = []
    for (batch,) in data:
        left.extend(batch)
        while len(left) >= 6:
            yield torch.stack(left[:6])
            left = left[6:]


@shape(kills=(3, 7, 12))
def g2_batches_of_a_packing_generator() -> None:
    data = loader()
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(packed(data)):
                learn(batch)


class Background(threading.Thread):
    """prefetch_generator's BackgroundGenerator."""

    def __init__(self, source: Any) -> None:
        super().__init__(daemon=True)
        self.queue: queue.Queue[Any] = queue.Queue(3)
        self.source = source
        self.start()

    def run(self) -> None:
        for item in self.source:
            self.queue.put(item)
        self.queue.put(None)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        item = self.queue.get()
        if item is None:
            raise StopIteration
        return item


class DataLoaderX(torch.utils.data.DataLoader[Any]):
    def __iter__(self) -> Any:
        return Background(super().__iter__())


@shape(case="X_epochs_DataLoaderX_background")
def g2_data_loader_x() -> None:
    data = DataLoaderX(samples(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9))
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)


@shape(case="X_steps_thread_prefetch", kills=(3,), warned="another thread")
def g2_thread_prefetcher_in_steps() -> None:
    data = loader(generator=torch.Generator().manual_seed(9))
    with protect(data=data) as run:
        batches = Background(forever(data))
        for _ in run.steps(20):
            learn(next(batches))


@shape(kills=(3, 8), warned="another thread")
def g2_thread_prefetcher_in_batches() -> None:
    data = loader(generator=torch.Generator().manual_seed(9))
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(Background(data)):
                learn(batch)


@shape(case="X_steps_itertools_cycle", kills=(5, BATCHES - 1), warned="itertools.cycle")
def g1_cycle() -> None:
    """G1, F3"""
    data = loader()
    with protect(data=data) as run:
        batches = itertools.cycle(data)
        for _ in run.steps(STEPS):
            learn(next(batches))


@shape(kills=(3, 8), warned="itertools.cycle")
def g1_cycle_in_zip() -> None:
    labelled, data = loader(dataset=samples(16)), loader()
    with protect() as run:
        for _ in run.epochs(2):
            for batch, other in zip(run.batches(data), itertools.cycle(labelled), strict=False):
                learn((batch, other))


@shape(case="X_packed_sequences", kills=(3,), warned="`left`")
def g2_packing_generator_in_steps() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = packed(data)
        for _ in run.steps(7):
            learn(next(batches))


def counted(data: Any) -> Any:
    passes = 0
    while True:
        for batch in data:
            yield batch, passes
        passes += 1


@shape(kills=(3,), warned="`passes`")
def g2_generator_that_counts_passes() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = counted(data)
        for _ in run.steps(20):
            learn(next(batches))


def moved(data: Any, device: str, scale: float = 2.0) -> Any:
    factor = scale * 1.0
    while True:
        for (batch,) in data:
            batch = batch.to(device) * factor
            yield batch


@shape(kills=(3, 14))
def g2_generator_without_state() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = moved(data, "cpu")
        for _ in run.steps(20):
            learn(next(batches))


# ---- sources that keep their own position ------------------------------------------------------------------


def nodes() -> Any:
    data = [torch.tensor([float(number)]) for number in range(48)]
    sampler = torch.utils.data.RandomSampler(range(48), generator=torch.Generator().manual_seed(4))
    node = torchdata.nodes.Batcher(
        torchdata.nodes.MapStyleWrapper(data, torchdata.nodes.SamplerWrapper(sampler)), 4
    )
    return torchdata.nodes.Loader(node)


@shape(case="X_L_nodes_steps_handed", kills=(3, 7, (2, 8)))
def g10_nodes_handed_over() -> None:
    """G10"""
    data = nodes()
    with protect(data=data) as run:
        batches = iter(data)
        for _ in run.steps(BATCHES):
            learn(next(batches))


@shape(case="X_L_nodes_batches", kills=(3, 7))
def g10_nodes_in_batches() -> None:
    data = nodes()
    with protect() as run:
        for _ in run.epochs(1):
            for batch in run.batches(data):
                learn(batch)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from torch.arange(48.0)


@shape(kills=(5, BATCHES + 5))
def g13_iterable_dataset() -> None:
    data = torch.utils.data.DataLoader(Stream(), batch_size=4)
    with protect() as run:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                learn(batch)


# ---- an evaluation with another loader, at the first step and later ----------------------------------------


def _evaluated() -> float:
    return sum(float(each.sum()) for batch in loader(shuffle=False, batch_size=8) for each in batch) / 1000


@shape(kills=(4, 8, 9, (4, 9), 12))
def evaluation_in_a_tick_loop() -> None:
    data, value = loader(), 0.0
    with protect(data=data) as run:
        batches = iter(data)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(data)
                batch = next(batches)
            learn(batch, scale=1 + value / 10)
            if run.step in (0, 9):
                value += _evaluated()
            run.tick()
            if run.step >= STEPS:
                break


@shape(kills=(4, 8, 9))
def evaluation_in_a_tick_loop_whose_head_asks() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        while run.step < STEPS:
            learn(next(batches))
            if run.step in (0, 9):
                _evaluated()
            run.tick()


@shape(kills=(4, 8, 9))
def evaluation_in_steps() -> None:
    data = loader()
    with protect(data=data) as run:
        batches = forever(data)
        for step in run.steps(STEPS):
            learn(next(batches))
            if step in (0, 9):
                _evaluated()


def _one_ahead(batches: Any) -> Any:
    """Holds one batch back."""
    former = None
    for batch in batches:
        if former is not None:
            yield former
        former = [part + 0 for part in batch]


@shape(kills=(0, 1, 2, 3, 4, 8, (4, 9), 12))
def enumerate_over_a_look_ahead() -> None:
    """The counts of a resumed pass begin with the batches that are drawn again."""
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            for index, batch in enumerate(_one_ahead(run.batches(data))):
                learn(batch, scale=1 / (1 + index + run.batch))


@shape(kills=(4, 8), warned="is not saved: it is a generator")
def look_ahead_over_an_enumerate() -> None:
    data = loader()
    with protect(data=data) as run:
        for _ in run.epochs(2):
            numbered = ([torch.tensor([index]), *batch] for index, batch in enumerate(run.batches(data)))
            for batch in _one_ahead(numbered):
                learn(batch)
