"""Ranks of DistributedDataParallel, forked from one process: each case is trained without and with an
interruption.

python bucket_ranks.py RANKS: writes, for every case, what rank 0 saw as JSON.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastcall.adapters.torch.distributed.ddp_buckets import Layout, Layouts

STEPS = 5
SMALL = {"bucket_cap_mb": 0.002}
CASES: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "several buckets": SMALL,
    "gradients in buckets": {**SMALL, "gradient_as_bucket_view": True},
    "static graph": {**SMALL, "static_graph": True},
    "unused parameters": {**SMALL, "find_unused_parameters": True},
}


class Net(nn.Module):
    """The layers are not used in the order in which they are defined, one is ignored by DDP, and one is of
    another type."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(48, 8), nn.Linear(16, 48), nn.Linear(48, 48).double()
        self.unshared = nn.Parameter(torch.zeros(48))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.middle(torch.relu(self.first(batch) + self.unshared).double())
        out: torch.Tensor = self.last(torch.relu(inner).float())
        return out


class Training:
    """Two wrappers, of which the second is trained on what the first makes."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        nets = [Net(), Net()]
        for net in nets:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["unshared"])
            net.unshared.requires_grad_(False)
        self.wrappers = [DistributedDataParallel(net, **options) for net in nets]
        self.optimizers = [torch.optim.AdamW(wrapper.parameters(), lr=1e-2) for wrapper in self.wrappers]

    def step(self, number: int) -> None:
        noise = torch.Generator().manual_seed(100 * number + dist.get_rank())
        for wrapper, optimizer in zip(self.wrappers, self.optimizers, strict=True):
            optimizer.zero_grad()
            wrapper(torch.randn(4, 16, generator=noise)).square().mean().backward()
            optimizer.step()

    def state(self) -> Any:
        return copy.deepcopy([part.state_dict() for part in (*self.wrappers, *self.optimizers)])  # type: ignore[attr-defined]

    def load(self, state: Any) -> None:
        for part, kept in zip((*self.wrappers, *self.optimizers), state, strict=True):
            part.load_state_dict(copy.deepcopy(kept))  # type: ignore[attr-defined]

    def digest(self) -> str:
        data = b"".join(
            p.detach().numpy().tobytes() for wrapper in self.wrappers for p in wrapper.parameters()
        )
        return hashlib.sha256(data).hexdigest()


def interrupted(options: dict[str, Any]) -> dict[str, Any]:
    """The digest of a run that was not, and of those that went on from a step: with the buckets of before,
    and without."""
    whole, saved = Training(**options), {}
    layouts = Layouts(whole.wrappers)
    for number in range(STEPS):
        whole.step(number)
        layouts.look()
        saved[number + 1] = (whole.state(), json.loads(json.dumps(layouts.document())))
    return {
        "whole": whole.digest(),
        "settled": layouts.settled,
        "document": layouts.document(),
        "back": {at: resumed(options, at, *saved[at]) for at in (1, 2, 4)},
        "without": resumed(options, 1, saved[1][0], []),
    }


def resumed(options: dict[str, Any], at: int, state: Any, document: list[Layout | None]) -> str:
    again = Training(**options)
    again.load(state)
    layouts = Layouts(again.wrappers)
    layouts.put_back(document)
    for number in range(at, STEPS):
        again.step(number)
    return again.digest()


def only_first(options: dict[str, Any]) -> list[Any]:
    """Only the first rank has saved a layout, and then only the second has: which layouts the wrappers begin
    with."""
    training = Training(**options)
    for number in range(2):
        training.step(number)
    layouts = Layouts(training.wrappers)
    layouts.look()
    document = layouts.document()
    seen = []
    for holder in (0, 1):
        fresh = Layouts(Training(**options).wrappers)
        fresh.put_back(document if dist.get_rank() == holder else [])
        seen.append(fresh.document())
    return [document, *seen]


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)  # type: ignore[attr-defined]
    found: dict[str, Any] = {name: interrupted(options) for name, options in CASES.items()}
    found["only first"] = only_first(SMALL)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        size = int(sys.argv[1])
        context = torch.multiprocessing.get_context("fork")
        ranks = [context.Process(target=functools.partial(main, rank, size, folder)) for rank in range(size)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            sys.exit(f"exit codes {[one.exitcode for one in ranks]}")
        print(json.dumps([json.load(open(os.path.join(folder, f"{rank}.json"))) for rank in range(size)]))
