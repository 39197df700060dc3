"""One of four real ranks: trains under HSDP, FSDP with tensor parallelism, and DDP; captures the state from a
side thread between forward and backward; and compares what the ranks hold together with what torch itself
gathers.

    ranks_state_pieces.py RENDEZVOUS RANK
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from helpers.models.roundtrip import read
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.state.entries import StateSet

WORLD = 4


def spread(net: torch.nn.Sequential, layout: str) -> torch.nn.Module:
    if layout == "ddp":
        return DistributedDataParallel(net)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    if layout == "hsdp":
        fully_shard(net[0], mesh=grid)
        return fully_shard(net, mesh=grid)
    parallelize_module(net, grid["other"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(net, mesh=grid["data"])


def captured(state: StateSet) -> list[tuple[str, Any, Any, Any, bytes]]:
    """As a rescue does it: from another thread."""
    found: list[tuple[str, Any, Any, Any, bytes]] = []

    def work() -> None:
        _, groups = state.capture()
        found.extend(
            (f"{group.name}/{entry.name}", entry.dtype, entry.shape, entry.share, read(entry.source))
            for group in groups
            for entry in group.entries
            if entry.share is not None
        )

    side = threading.Thread(target=work)
    side.start()
    side.join()
    return found


def assembled(pieces: list[list[tuple[str, Any, Any, Any, bytes]]]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for rank, mine in enumerate(pieces):
        for name, dtype, shape, share, data in mine:
            assert dtype == "F32" and rank in share.holders
            piece = (
                torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
                if data
                else torch.empty(shape)
            )
            box = tuple(
                slice(begin, begin + length) for begin, length in zip(share.offset, shape, strict=True)
            )
            held = times.setdefault(name, torch.zeros(share.whole))
            target = whole.setdefault(name, torch.full(share.whole, math.nan))
            assert not held[box].any() or torch.equal(target[box], piece), f"{name}: its holders do not agree"
            assert not data or (held[box].max() < len(share.holders)), (
                f"{name}: more ranks have it than hold it"
            )
            target[box] = piece
            held[box] += 1
    assert not any(tensor.isnan().any() for tensor in whole.values()), "a tensor is not covered"
    return whole


def check(layout: str) -> None:
    torch.manual_seed(1)
    net = spread(torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3)), layout)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    state = StateSet({"model": net, "optimizer": optimizer})
    # ranks of one tensor must get the same batch
    torch.manual_seed(2 if layout == "both" else 2 + dist.get_rank())
    for _ in range(2):
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state.replicated(placement.replicas())
    loss = net(torch.randn(4, 6)).square().sum()
    pieces: list[Any] = [None] * WORLD
    dist.all_gather_object(pieces, captured(state))
    whole = assembled(pieces)
    loss.backward()
    named = getattr(net, "module", net).named_parameters()
    expected = {f"model/{name}": parameter for name, parameter in named}
    for index, kept in enumerate(optimizer.state.values()):
        expected[f"optimizer/state.{index}.exp_avg"] = kept["exp_avg"]
    for name, tensor in expected.items():
        full = tensor.full_tensor() if placement.is_dtensor(tensor) else tensor
        assert torch.equal(whole[name], full.detach()), f"{layout}: {name}"
    holders = {share.holders for mine in pieces for _, _, _, share, _ in mine}
    print(f"{layout} {sorted(holders)}", flush=True)


def main() -> None:
    rendezvous, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    for layout in ("hsdp", "both", "ddp"):
        check(layout)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
