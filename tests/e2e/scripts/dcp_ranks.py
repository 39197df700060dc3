"""Jobs of several ranks that save and load with lastcall.dcp. argv: a folder, then jobs such as save,load@2:
these two, on two ranks.

The ranks are forks of one process that has imported torch, which takes longer than all the rest. A line says
how each job ended."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lastcall.core.checkpoint import record as records
from lastcall.dcp import Reader, Writer


def reference() -> dict[str, torch.Tensor]:
    """What the whole tensors hold, on any rank of any world."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(*shape, generator=generator)
        for name, shape in (("rows", (7, 6)), ("columns", (5, 9)), ("small", (1, 4)))
    }


def tensors(world: int, mesh: Any, *, fill: bool) -> dict[str, Any]:
    whole = reference()
    dims = {"rows": 0, "columns": 1, "small": 0}
    state: dict[str, Any] = {
        name: distribute_tensor(
            whole[name] if fill else torch.zeros_like(whole[name]), mesh, [Shard(dims[name])]
        )
        for name in whole
    }
    copied = torch.arange(3_000_000.0).reshape(1000, 3000)
    state["replicated"] = distribute_tensor(copied if fill else torch.zeros_like(copied), mesh, [Replicate()])
    state["plain"] = torch.full((11,), 3.0 if fill else 0.0)
    state["count"] = 12 if fill else 0
    state["order"] = (1, "two", None) if fill else None
    return state


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(state: dict[str, Any]) -> None:
    for name, expected in reference().items():
        assert torch.equal(full(state[name]), expected), name
    assert torch.equal(full(state["replicated"]), torch.arange(3_000_000.0).reshape(1000, 3000))
    assert state["plain"].tolist() == [3.0] * 11
    assert (state["count"], state["order"]) == (12, (1, "two", None))


def model(mesh: Any, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    for layer in made:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return made, optimizer


def fsdp(mesh: Any, seed: int) -> dict[str, Any]:
    parameters, optimizer = get_state_dict(*model(mesh, seed))
    return {"model": parameters, "optimizer": optimizer}


def digest(state: Any) -> dict[str, float]:
    """The same number for the same whole tensors, whatever the sharding."""
    found: dict[str, float] = {}
    for group, names in state.items():
        for name, value in (names if group == "model" else names["state"]).items():
            for key, one in value.items() if isinstance(value, dict) else [("", value)]:
                found[f"{group} {name} {key}"] = float(full(one).double().sum())
    return found


def save(folder: Path, rank: int, world: int, mesh: Any) -> None:
    for _ in range(2):  # the second replaces the first
        dcp.save(tensors(world, mesh, fill=True), storage_writer=Writer(folder / "c", threads=2))
    record = records.read(folder / "c")
    assert record.world == world
    sizes = [file.size for file in record.files if file.name.startswith("dcp-")]
    # a row of the replicated one is 12,000 bytes
    assert len(sizes) == world and max(sizes) - min(sizes) < 40_000, sizes
    dist.barrier()  # the next save replaces what is looked at here
    state = fsdp(mesh, 1)
    dcp.async_save(state, storage_writer=Writer(folder / "fsdp", threads=2)).result()
    found = digest(state)  # a collective
    assert found
    if rank == 0:
        (folder / "digest").write_text(repr(found))


def load(folder: Path, rank: int, world: int, mesh: Any) -> None:
    state = tensors(world, mesh, fill=False)
    dcp.load(state, storage_reader=Reader(folder / "c", threads=2))
    check(state)
    live = fsdp(mesh, 2)
    dcp.load(live, storage_reader=Reader(folder / "fsdp", threads=2))
    assert repr(digest(live)) == (folder / "digest").read_text()


def hsdp(folder: Path, rank: int, world: int, mesh: Any) -> None:
    """Two replicas of two shards: each half of a shard is written by one of the two that hold it."""
    pairs = init_device_mesh("cpu", (world // 2, 2))
    whole = torch.arange(4000.0).reshape(40, 100)
    dcp.save(
        {"w": distribute_tensor(whole, pairs, [Replicate(), Shard(0)])},
        storage_writer=Writer(folder / "hsdp", threads=1),
    )
    sizes = {
        file.name: file.size for file in records.read(folder / "hsdp").files if file.name.startswith("dcp-")
    }
    assert len(sizes) == world and len(set(sizes.values())) == 1, sizes
    live = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])}
    dcp.load(live, storage_reader=Reader(folder / "hsdp", threads=1))
    assert torch.equal(full(live["w"]), whole)


def refuse(folder: Path, rank: int, world: int, mesh: Any) -> None:
    """One rank cannot: none commits, all are told, and what was there before stays."""
    state = {"plain": torch.ones(4), f"of rank {rank}": object() if rank == 1 else 1}
    said = "nothing"
    try:
        dcp.save(state, storage_writer=Writer(folder / "c", threads=1))
    except BaseException as error:  # DCP's CheckpointException is no Exception
        said = str(error)
    assert "of rank 1" in said, said


def rank_of(folder: Path, jobs: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for name in jobs.split(","):
        {"save": save, "load": load, "hsdp": hsdp, "refuse": refuse}[name](folder, rank, world, mesh)
        dist.barrier()
    dist.destroy_process_group()


def fork(folder: Path, jobs: str, rank: int, world: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        rank_of(folder, jobs, rank, world)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    for number, words in enumerate(sys.argv[2:]):
        jobs, _, world = words.partition("@")
        folder = Path(sys.argv[1])
        (folder / "rendezvous").unlink(missing_ok=True)
        ranks = [fork(folder, jobs, rank, int(world)) for rank in range(int(world))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(f"{number} {words} {codes}", flush=True)


if __name__ == "__main__":
    main()
