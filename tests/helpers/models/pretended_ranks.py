"""One process that pretends to be each rank of a world in turn (torch's fake process group: nothing is sent,
every collective returns something). What fully_shard() and DistributedDataParallel put where is the same as
in a real world; what they would send is not."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.models.roundtrip import read, write
from lastcall import types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.state.entries import Loading, StateSet
from lastcall.formats import safetensors

WORLDS = {"plain": 1, "ddp": 2, "fsdp2": 2, "fsdp4": 4, "hsdp": 4, "tensor": 2, "both": 4}


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh(*sizes: int) -> DeviceMesh:
    """With names of its own: torch keeps an equal mesh of before, where this process was another rank."""
    names = tuple(f"{uuid.uuid4()}" for _ in sizes)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def model() -> torch.nn.Sequential:
    """Its last layer has three rows: of four ranks, one has none of them."""
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3))


def spread(net: torch.nn.Sequential, layout: str) -> torch.nn.Module:
    """The model as one of WORLDS has it. In none of them does a rank ask another for weights."""
    if layout == "ddp":
        return DistributedDataParallel(net, init_sync=False)
    if layout in ("tensor", "both"):
        grid = mesh(WORLDS[layout] // 2, 2)
        data, tensor = grid.mesh_dim_names or ()
        parallelize_module(
            net, grid[tensor], {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None
        )
        return fully_shard(net, mesh=grid[data]) if layout == "both" else net
    if layout in ("fsdp2", "fsdp4", "hsdp"):
        grid = mesh(2, 2) if layout == "hsdp" else mesh(WORLDS[layout])
        fully_shard(net[0], mesh=grid)
        return fully_shard(net, mesh=grid)
    return net


class Member:
    """One rank of a training."""

    def __init__(self, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = spread(model(), layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = StateSet({"model": self.model, "optimizer": self.optimizer})
        self.state.replicated(placement.replicas())

    def train(self, steps: int) -> None:
        """The gradient is the parameter itself, so that no rank needs another."""
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.detach().clone()
            self.optimizer.step()


class Checkpoint:
    """What all ranks of a world have put together, in memory."""

    def __init__(self) -> None:
        self.documents: list[str] = []
        self.own: list[dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]]] = []
        self.whole: dict[str, dict[str, tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = {}

    def add(self, state: StateSet, grads: bool = False) -> None:
        document, groups = state.capture()
        waiting = state.gradients() if grads else None
        groups += () if waiting is None else (waiting,)
        self.documents.append(json.dumps(document))
        own: dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]] = {}
        for group in groups:
            for entry in group.entries:
                if entry.share is None:
                    own.setdefault(group.name, {})[entry.name] = (
                        entry.dtype,
                        entry.shape,
                        read(entry.source),
                    )
                else:
                    self._piece(group.name, entry, entry.share)
        self.own.append(own)

    def _piece(self, group: str, entry: types.TensorEntry, share: types.Share) -> None:
        size = safetensors.DTYPES[entry.dtype]
        new = (entry.dtype, np.zeros((*share.whole, size), np.uint8), np.zeros(share.whole, np.int64))
        dtype, data, holders = self.whole.setdefault(group, {}).setdefault(entry.name, new)
        assert dtype == entry.dtype and data.shape == (*share.whole, size)
        box = _box(share.offset, entry.shape)
        piece = np.frombuffer(read(entry.source), np.uint8).reshape(*entry.shape, size)
        assert not holders[box].any() or np.array_equal(data[box], piece), (
            f"{entry.name}: the holders do not agree"
        )
        data[box] = piece
        holders[box] += 1

    def tensors(self) -> dict[str, bytes]:
        """Every tensor that is shared, whole; and those that rank 0 has for itself. Those that only some
        ranks have ("~0") go by their plain names."""
        found = {
            f"{group}/{name}": kept[2] for group, names in self.own[0].items() for name, kept in names.items()
        }
        for group, names in self.whole.items():
            for name, kept in names.items():
                known = found.setdefault(f"{group}/{name.split('~')[0]}", kept[1].tobytes())
                assert known == kept[1].tobytes(), f"{name} is not the same on other ranks"
        return found

    def restore(self, state: StateSet, rank: int) -> Loading:
        which = rank if rank < len(self.documents) else 0
        stored: dict[str, dict[str, safetensors.Stored]] = {}
        data: dict[tuple[str, str], bytes] = {}
        for group, names in self.own[which].items():
            for name, (dtype, shape, own) in names.items():
                stored.setdefault(group, {})[name] = safetensors.Stored(dtype, shape, 0, len(own))
                data[group, name] = own
        for group, wholes in self.whole.items():
            for name, (dtype, array, _) in wholes.items():
                stored.setdefault(group, {})[name] = safetensors.Stored(
                    dtype, array.shape[:-1], 0, array.nbytes
                )
                data[group, name] = array.tobytes()
        loading = state.prepare(json.loads(self.documents[which]), stored)
        for group, targets in loading.targets.items():
            for name, target in targets.items():
                _deliver(target, data[group, name], stored[group][name])
        loading.finish()
        return loading


def _box(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))


def _deliver(target: Any, data: bytes, stored: safetensors.Stored) -> None:
    for one in getattr(target, "targets", (target,)):
        if isinstance(one, types.Region):
            array = np.frombuffer(data, np.uint8).reshape(*stored.shape, safetensors.DTYPES[stored.dtype])
            write(one.target, np.ascontiguousarray(array[_box(one.offset, one.shape)]).tobytes())
        else:
            write(one, data)


def save(layout: str, seed: int = 1, steps: int = 2) -> Checkpoint:
    """Train as every rank of a world, one after the other, and put together what they save."""
    checkpoint = Checkpoint()
    for rank in range(WORLDS[layout]):
        with rank_of(rank, WORLDS[layout]):
            member = Member(layout, seed)
            member.train(steps)
            checkpoint.add(member.state)
    return checkpoint
