"""What the ranks save, and how: a state sharded as FSDP2 does it, through run.save(), through dcp.save() with
torch's writer and with lastcall's, and the same bytes raw."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench import disk, raw, save, state
from bench.measure import Kind, Method

DCP_THREADS = (1, 2, 4)
RAW_THREADS = (4, 16)


def together(work: Callable[[], object]) -> None:
    """Done by rank 0 when all are there, and over for all."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def sharded(gigabytes: float) -> state.State:
    """The parameters and moments of bench.state.gpt as DTensors; the counters of steps are on every rank."""
    model = state.outline(gigabytes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    return state.filled(
        model.to_empty(device="cpu"), f"model and AdamW, fp32, FSDP2 on {dist.get_world_size()} ranks"
    )


class LastcallSave(save.LastcallSave):
    """run.save() on every rank, from the call until the commit is known to all."""

    def close(self) -> None:
        if self._saver:
            self._saver.close()
            self._saver = None
        together(lambda: disk.clear(self._folder))


class DcpSave(Method):
    """dcp.save() with a storage writer, into a folder that is removed afterwards."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        family: str,
        saved: state.State,
        folder: Path,
        writer: Callable[[Path], StorageWriter],
    ) -> None:
        super().__init__(name, kind, family)
        self._state = saved
        self._folder = folder / "".join(c if c.isalnum() else "-" for c in name)
        self._writer = writer

    def setup(self) -> None:
        """Its first call imports and checks; that is not what is compared."""
        self.before()
        self._save({"x": torch.zeros(1)})
        self.after()

    def before(self) -> None:
        together(self._folder.mkdir)

    def run(self) -> None:
        self._save(self._state.tensors())

    def _save(self, tensors: dict[str, torch.Tensor]) -> None:
        path = self._folder / "checkpoint"
        dcp.save(tensors, storage_writer=self._writer(path))
        if dist.get_rank() == 0:
            disk.fsync(path)
            disk.fsync(self._folder)

    def after(self) -> None:
        together(lambda: disk.clear(self._folder))


def torch_writer(threads: int) -> Callable[[Path], StorageWriter]:
    return lambda path: dcp.FileSystemWriter(path, sync_files=True, thread_count=threads)


def lastcall_writer(path: Path) -> StorageWriter:
    import lastcall.dcp

    return lastcall.dcp.Writer(path)


def raw_writes(folder: Path, nbytes: int) -> list[Method]:
    """Every rank writes its part into a folder of its own: space written before, and new space."""
    own = folder / f"raw-{dist.get_rank()}"
    own.mkdir()
    turns = itertools.cycle(range(raw.RECYCLED_FILES))
    found: list[Method] = [
        raw.RawWrite(way, own, nbytes // dist.get_world_size(), threads, turns)
        for way in (raw.Way.RECYCLED, raw.Way.NEW)
        for threads in RAW_THREADS
    ]
    for method in found:
        method.name += " a rank"
    return found


def methods(saved: state.State, folder: Path) -> list[Method]:
    return [
        *raw_writes(folder, saved.nbytes),
        LastcallSave(saved, folder),
        DcpSave("dcp.save, lastcall.dcp.Writer", Kind.ASIDE, "writer", saved, folder, lastcall_writer),
        *(
            DcpSave(
                f"dcp.save, FileSystemWriter, {_threads(count)} a rank",
                Kind.PEER,
                "DCP",
                saved,
                folder,
                torch_writer(count),
            )
            for count in DCP_THREADS
        ),
    ]


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"
