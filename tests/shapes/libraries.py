"""Pipelines of other libraries: torchdata, Hugging Face's datasets, webdataset, more_itertools."""

from __future__ import annotations

import importlib
import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from helpers.data.pipelines import BATCHES, forever, learn, loader, protect, samples, shape
from shapes.holding import Chunks, OwnEpochs, StreamPosition, _stateful, train, train_steps
from shapes.loaders import KILLS, Lines, noisy

COUNT = 4 * BATCHES
HF = ("datasets",)
WDS = ("webdataset",)
MORE = ("more_itertools",)


# ---- torchdata: StatefulDataLoader -------------------------------------------------------------------------


@shape(case="E_L_sdl_w0", kills=KILLS)
def stateful() -> None:
    train(_stateful(samples()))


@shape(case="S_L_sdl_w0", kills=KILLS)
def stateful_steps() -> None:
    train_steps(_stateful(samples()))


@shape(case="E_L_sdl_w2_noaug", kills=KILLS, slow=True)
def stateful_workers() -> None:
    train(_stateful(samples(), num_workers=2))


@shape(case="S_L_sdl_w2_noaug", kills=KILLS, slow=True)
def stateful_workers_steps() -> None:
    train_steps(_stateful(samples(), num_workers=2))


@shape(case="E_L_sdl_w2_persist_noaug", kills=KILLS, slow=True)
def stateful_persistent_workers() -> None:
    train(_stateful(samples(), num_workers=2, persistent_workers=True))


@shape(case="S_L_sdl_w2_persist_noaug", kills=KILLS, slow=True)
def stateful_persistent_workers_steps() -> None:
    train_steps(_stateful(samples(), num_workers=2, persistent_workers=True))


@shape(case="E_L_sdl_iter_plain_w2", kills=KILLS, slow=True)
def stateful_stream_workers() -> None:
    train(_stateful(Lines(), num_workers=2, shuffle=None))


@shape(case="S_L_sdl_iter_plain_w2", kills=KILLS, slow=True)
def stateful_stream_workers_steps() -> None:
    train_steps(_stateful(Lines(), num_workers=2, shuffle=None))


class Resumable(IterableDataset[float]):
    """As torchdata's documentation has it: goes on inside a pass."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[float]:
        while self.at < COUNT:
            self.at += 1
            yield float(self.at * 7 % 101)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@shape(case="E_L_sdl_stateful_iterable_w0", kills=KILLS)
def stateful_resumable() -> None:
    train(_stateful(Resumable(), shuffle=None))


@shape(case="S_L_sdl_stateful_iterable_w0", kills=KILLS)
def stateful_resumable_steps() -> None:
    train_steps(_stateful(Resumable(), shuffle=None))


@shape(case="E_L_sdl_stateful_iterable_w2", kills=KILLS, slow=True)
def stateful_resumable_workers() -> None:
    train(_stateful(Resumable(), shuffle=None, num_workers=2), epochs=2)


@shape(case="S_L_sdl_stateful_iterable_w2", kills=KILLS, slow=True)
def stateful_resumable_workers_steps() -> None:
    train_steps(_stateful(Resumable(), shuffle=None, num_workers=2))


class Halves(Chunks):
    """A new order for each half, from a generator of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        super().__init__(24, lambda size: torch.randperm(size, generator=generator).tolist())


@shape(case="E_L_sdl_lazy_sampler", kills=(5, 8), slow=True)
def stateful_lazy_sampler() -> None:
    train(_stateful(samples(), sampler=RandomSampler(samples(), replacement=True, num_samples=COUNT)))


@shape(case="S_L_sdl_lazy_sampler", kills=(5, 8))
def stateful_lazy_sampler_steps() -> None:
    train_steps(_stateful(samples(), sampler=RandomSampler(samples(), replacement=True, num_samples=COUNT)))


@shape(case="S_L_sdl_own_epoch_sampler", warned="`sampler.ep` changes with every pass", kills=(5,))
def stateful_own_epochs_steps() -> None:
    train_steps(_stateful(samples(), sampler=OwnEpochs()))


@shape(case="S_L_dl_stateful_iterable_w0", kills=KILLS)
def own_position_steps() -> None:
    train_steps(DataLoader(StreamPosition(), 4))


# ---- Hugging Face datasets ---------------------------------------------------------------------------------


def _hf(iterable: bool = False, start: int = 0, stop: int = COUNT) -> Any:
    datasets: Any = importlib.import_module("datasets")
    made = datasets.Dataset.from_dict({"x": [float(number) for number in range(start, stop)]})
    return made.to_iterable_dataset(num_shards=4) if iterable else made.with_format("torch")


def _interleaved() -> Any:
    datasets: Any = importlib.import_module("datasets")
    return datasets.interleave_datasets(
        [_hf(True), _hf(True, 100, 148)], probabilities=[0.7, 0.3], seed=3
    ).with_format("torch")


def _shift(rows: dict[str, Any]) -> dict[str, Any]:
    return {"x": [float(x) + float(torch.rand(())) + random.random() for x in rows["x"]]}


@shape(case="E_L_hf_map", kills=KILLS, needs=HF, slow=True)
def hf_map() -> None:
    train(loader(dataset=_hf().map(lambda row: {"y": row["x"] * 2})))


@shape(case="S_L_hf_map", kills=KILLS, needs=HF, slow=True)
def hf_map_steps() -> None:
    train_steps(loader(dataset=_hf()))


@shape(case="E_L_hf_with_transform", kills=KILLS, needs=HF, slow=True)
def hf_transform() -> None:
    train(loader(dataset=_hf().with_transform(_shift)))


@shape(case="S_L_hf_with_transform", kills=KILLS, needs=HF, slow=True)
def hf_transform_steps() -> None:
    train_steps(loader(dataset=_hf().with_transform(_shift)))


@shape(case="E_L_hf_interleave", kills=KILLS, needs=HF, slow=True)
def hf_interleaved() -> None:
    train(DataLoader(_interleaved(), 4))


@shape(case="S_L_hf_interleave", kills=KILLS, needs=HF, slow=True)
def hf_interleaved_steps() -> None:
    train_steps(DataLoader(_interleaved(), 4))


def _hf_epochs(data: Any, dataset: Any) -> None:
    with protect() as run:
        for epoch in run.epochs(3):
            dataset.set_epoch(epoch)
            for batch in run.batches(data):
                learn(batch)


@shape(case="E_L_hf_iter_shuffle_buf_w0", kills=KILLS, needs=HF, slow=True)
def hf_buffer() -> None:
    dataset = _hf(True).shuffle(seed=5, buffer_size=10).with_format("torch")
    _hf_epochs(DataLoader(dataset, 4), dataset)


@shape(case="E_L_hf_iter_shuffle_buf_w2", kills=KILLS, needs=HF, slow=True)
def hf_buffer_workers() -> None:
    dataset = _hf(True).shuffle(seed=5, buffer_size=10).with_format("torch")
    _hf_epochs(DataLoader(dataset, 4, num_workers=2), dataset)


@shape(case="E_L_hf_iter_shuffle_noepoch_w0", kills=KILLS, needs=HF, slow=True)
def hf_buffer_without_epochs() -> None:
    train(DataLoader(_hf(True).shuffle(seed=5, buffer_size=10).with_format("torch"), 4))


@shape(case="S_L_hf_iter_shuffle_noepoch_w0", kills=KILLS, needs=HF, slow=True)
def hf_buffer_without_epochs_steps() -> None:
    train_steps(DataLoader(_hf(True).shuffle(seed=5, buffer_size=10).with_format("torch"), 4))


@shape(case="S_L_hf_iter_set_epoch_by_hand", kills=KILLS, needs=HF, slow=True)
def hf_set_epoch_by_hand() -> None:
    dataset = _hf(True).shuffle(seed=5, buffer_size=10).with_format("torch")
    data = DataLoader(dataset, 4)
    with protect(data=data) as run:
        epoch = 0
        batches = iter(data)
        for _ in run.steps(30):
            try:
                batch = next(batches)
            except StopIteration:
                epoch += 1
                dataset.set_epoch(epoch)
                batches = iter(data)
                batch = next(batches)
            learn(batch)


@shape(case="X_L_hf_iter_direct_noshuffle", kills=KILLS, needs=HF, slow=True)
def hf_stream_in_batches() -> None:
    dataset = _hf(True).with_format("torch").batch(4)
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(dataset):
                learn(batch)


@shape(
    case="X_L_hf_iter_direct_noshuffle", kills=(5,), needs=HF, slow=True, warned="the loop carries `batches`"
)
def hf_stream_handed_over() -> None:
    """Its state_dict() knows where it is in a pass; `forever` begins the next one."""
    dataset = _hf(True).with_format("torch").batch(4)
    with protect(dataset=dataset) as run:
        batches = forever(dataset)
        for _ in run.steps(30):
            learn(next(batches))


@shape(case="X_L_hf_iter_direct_steps", kills=(5,), needs=HF, slow=True, warned="the loop carries `batches`")
def hf_buffer_handed_over() -> None:
    dataset = _hf(True).shuffle(seed=5, buffer_size=10).with_format("torch").batch(4)
    with protect(dataset=dataset) as run:
        batches = forever(dataset)
        for _ in run.steps(30):
            learn(next(batches))


# ---- webdataset --------------------------------------------------------------------------------------------


def _shards() -> list[str]:
    for shard in range(4):
        with tarfile.open(f"shard-{shard}.tar", "w") as tar:
            for number in range(12 * shard, 12 * shard + 12):
                data = f"{number}".encode()
                info = tarfile.TarInfo(f"{number:04d}.txt")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return [str(Path(f"shard-{shard}.tar").resolve()) for shard in range(4)]


def _number(text: str) -> float:
    return float(text)


def _wds(shuffle: Any = None) -> Any:
    wds: Any = importlib.import_module("webdataset")
    dataset = wds.WebDataset(_shards(), shardshuffle=False)
    if shuffle is not None:
        dataset = shuffle(dataset, wds)
    return dataset.decode().to_tuple("txt").map_tuple(_number)


@shape(case="E_L_wds_noshuffle_w0", kills=KILLS, needs=WDS)
def wds() -> None:
    train(DataLoader(_wds(), 4))


@shape(case="S_L_wds_noshuffle_w0", kills=KILLS, needs=WDS)
def wds_steps() -> None:
    train_steps(DataLoader(_wds(), 4))


@shape(case="E_L_wds_noshuffle_w2", kills=KILLS, needs=WDS, slow=True)
def wds_workers() -> None:
    train(DataLoader(_wds(), 4, num_workers=2))


@shape(case="E_L_wds_detshuffle_w0", kills=(5, BATCHES - 1, BATCHES + 5), needs=WDS)
def wds_shuffled_by_a_seed() -> None:
    train(DataLoader(_wds(lambda dataset, wds: dataset.compose(wds.detshuffle(10, seed=3))), 4))


@shape(
    case="E_L_wds_shuffle_w0",
    kills=(5, BATCHES + 5),
    needs=WDS,
    warned="`_shuffle` (filters.py",
    repeatable=False,
)
def wds_shuffled_by_the_clock() -> None:
    """Its generator is seeded with the time and the process id in each pass."""
    train(DataLoader(_wds(lambda dataset, wds: dataset.shuffle(10)), 4))


@shape(case="X_L_wds_WebLoader", kills=KILLS, needs=WDS)
def wds_loader() -> None:
    wds: Any = importlib.import_module("webdataset")
    data = wds.WebLoader(_wds(), batch_size=4)
    with protect() as run:
        for _ in run.epochs(3):
            for batch in run.batches(data):
                learn(batch)


# ---- more_itertools, and wrappers --------------------------------------------------------------------------


@shape(case="X_L_peekable_over_batches", kills=(5, BATCHES + 5), needs=MORE, warned="`peekable.peek`")
def peekable() -> None:
    more: Any = importlib.import_module("more_itertools")
    data = noisy()
    with protect() as run:
        for _ in run.epochs(3):
            batches = more.peekable(run.batches(data))
            for batch in batches:
                learn(batch, scale=1.0 if batches else 0.5)


@shape(
    case="X_chunked_accum",
    kills=(5, BATCHES + 5),
    needs=MORE,
    warned="the count of islice around run.batches()",
)
def chunked() -> None:
    more: Any = importlib.import_module("more_itertools")
    data = noisy()
    with protect() as run:
        for _ in run.epochs(3):
            for group in more.chunked(run.batches(data), 3):
                for number, batch in enumerate(group):
                    learn(batch, update=number == 2)


class Wrapped:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            yield batch * 2


@shape(case="X_wrapper_class_handed", refused="cannot be saved")
def wrapper_is_handed_over() -> None:
    data = Wrapped(noisy())
    with protect(data=data) as run:
        batches = forever(data)
        for _ in run.steps(30):
            learn(next(batches))
