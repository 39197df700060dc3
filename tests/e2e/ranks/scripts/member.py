"""What the rank scripts share: joining the others, data, digests, and the moments in which nothing
happens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from helpers.ranks import plan as ranks_plan
from lastcall.storage import files as storage

SAMPLES, BATCH, FEATURES, CLASSES = 160, 4, 16, 8


@dataclass(frozen=True)
class Member:
    """One rank of the run."""

    rank: int
    world: int
    plan: ranks_plan.Plan
    journal: ranks_plan.Journal

    def lose_time(self, step: int) -> None:
        """The beginning of a step: the time in which signals fall, and an evaluation if there is one."""
        pausing = self.plan.pausing is None or self.rank in self.plan.pausing
        if pausing and step in self.plan.pauses and self.journal.first_time(f"evaluation-{step}-{self.rank}"):
            self.journal.say("evaluating", step=step)
            time.sleep(self.plan.pauses[step])
        time.sleep(self.plan.seconds + self.plan.slow.get(self.rank, 0.0))

    def strike(self, step: int, where: str) -> None:
        self.journal.strike(self.plan.fault, step, where)

    def tail(self, step: int) -> None:
        """After the last collective of the last step: the others finish, this one takes its time."""
        if step == self.plan.steps - 1:
            time.sleep(self.plan.tail.get(self.rank, 0.0))

    def files(self) -> storage.Files | None:
        return _SlowDisk(self.plan.disk_seconds) if self.plan.disk_seconds else None

    def done(self, end: dict[str, str]) -> None:
        self.journal.say("done", state=end)
        print(json.dumps({"rank": self.rank, **end}), flush=True)

    def late(self) -> None:
        time.sleep(self.plan.late.get(self.rank, 0.0))


@contextlib.contextmanager
def joined() -> Iterator[Member]:
    """A member of the process group; alone where nobody set RANK."""
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)
    ranks_plan.move()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    journal = ranks_plan.Journal(rank)
    dist.init_process_group("gloo")
    journal.say("joined")
    yield Member(rank, dist.get_world_size(), ranks_plan.read_plan(), journal)
    dist.destroy_process_group()


class _SlowDisk(storage.Files):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def fsync(self, fd: int) -> None:
        time.sleep(self._seconds)
        super().fsync(fd)


class Samples(Dataset[tuple[int, torch.Tensor, int]]):
    """Each sample comes with its own number, so that a script can tell what it was given."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(4)
        self.features = torch.randn(SAMPLES, FEATURES, generator=source)
        self.classes = torch.randint(0, CLASSES, (SAMPLES,), generator=source)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, self.features[index], int(self.classes[index])


def net(width: int) -> nn.Module:
    """Batch normalization and dropout: state and randomness that are each rank's own."""

    def block(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]

    return nn.Sequential(*block(FEATURES), *block(width), *block(width), nn.Linear(width, CLASSES))


def loader(member: Member) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    data = Samples()
    sampler: DistributedSampler[Any] = DistributedSampler(data, member.world, member.rank, seed=7)
    return DataLoader(data, batch_size=BATCH, sampler=sampler), sampler


class Feed:
    """Epoch after epoch of a loader. `progress` is saved with the run: the epoch, and if it is there a digest
    of all samples so far."""

    def __init__(
        self, source: DataLoader[Any], sampler: DistributedSampler[Any], progress: dict[str, Any]
    ) -> None:
        self._source = source
        self._sampler = sampler
        self._progress = progress
        self._batches = self._iterate()

    def _iterate(self) -> Iterator[Any]:
        while True:
            self._sampler.set_epoch(self._progress["epoch"])
            yield from self._source
            self._progress["epoch"] += 1

    def take(self, count: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], str]:
        """The batches of a step, and the numbers of their samples in words."""
        batches = [next(self._batches) for _ in range(count)]
        names = " ".join(str(number) for indices, _, _ in batches for number in indices.tolist())
        if "seen" in self._progress:
            self._progress["seen"] = hashlib.sha256(f"{self._progress['seen']} {names}".encode()).hexdigest()
        return [(features, classes) for _, features, classes in batches], names


def adamw(member: Member, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that there is a moment at which half of a step is done."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, lr=1e-2)
    fault = member.plan.fault
    if fault is not None and fault.where == "inside":
        real = optimizer._init_group

        def begin(group: dict[str, Any], *rest: Any) -> Any:
            steps = {int(state["step"]) for state in optimizer.state.values()}
            if group is optimizer.param_groups[1] and steps:
                member.strike(max(steps) - 1, "inside")
            return real(group, *rest)

        optimizer._init_group = begin
    return optimizer  # type: ignore[no-any-return]


def progress(member: Member) -> dict[str, Any]:
    return {"epoch": 0, "seen": ""} if member.plan.personal else {"epoch": 0}


def digests(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, str]:
    """Of parameters, buffers, optimizer state, and anything else. Shards are gathered, so every rank must
    ask."""
    found: dict[str, Any] = {
        "parameters": [parameter.detach() for parameter in model.parameters()],
        "buffers": list(model.buffers()),
        "optimizer": optimizer.state_dict(),
        **more,
    }
    return {name: digest(value) for name, value in found.items()}


def digest(value: Any) -> str:
    hasher = hashlib.sha256()
    _update(hasher, value)
    return hasher.hexdigest()[:16]


def _update(hasher: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        hasher.update(
            f"{value.dtype}{tuple(value.shape)}".encode() + value.detach().contiguous().numpy().tobytes()
        )
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            hasher.update(repr(key).encode())
            _update(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(f"{len(value)}".encode())
        for item in value:
            _update(hasher, item)
    else:
        hasher.update(repr(value).encode())
