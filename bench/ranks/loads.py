"""How the ranks bring a sharded state back, into its live tensors: from the disk ("cold"), or from the page
cache ("warm")."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench import disk, ours, raw, resume, state
from bench.measure import Kind, Method, Timing
from bench.ranks import saves

_BLOCK = 8 << 20


class Load(resume.Restore):
    """One checkpoint of all ranks. Each rank checks that it got back every byte it had."""

    def __init__(
        self, name: str, kind: Kind, saved: state.State, folder: Path, expected: dict[str, str], warm: bool
    ) -> None:
        super().__init__(name, kind, saved, folder, expected)
        self._warm = warm

    def setup(self) -> None:
        saves.together(self._folder.mkdir)
        self.write()

    def before(self) -> None:
        self._state.scribble()
        saves.together(lambda: _read(self.checkpoint()) if self._warm else disk.evict(self._folder))

    def close(self) -> None:
        saves.together(lambda: disk.clear(self._folder))

    def checkpoint(self) -> Path:
        return self._folder / "checkpoint"


class DcpLoad(Load):
    def write(self) -> None:
        dcp.save(
            self._state.tensors(), storage_writer=dcp.FileSystemWriter(self.checkpoint(), thread_count=4)
        )

    def run(self) -> None:
        dcp.load(self._state.tensors(), storage_reader=dcp.FileSystemReader(self.checkpoint()))


class ReaderLoad(Load):
    """Digests are checked on the way, as in the next one."""

    def write(self) -> None:
        dcp.save(self._state.tensors(), storage_writer=saves.lastcall_writer(self.checkpoint()))

    def run(self) -> None:
        import lastcall.dcp

        dcp.load(self._state.tensors(), storage_reader=lastcall.dcp.Reader(self.checkpoint()))


class LastcallLoad(Load):
    """From protect() until training could begin on this rank."""

    def write(self) -> None:
        ours.fill(self._folder, self._state.model, self._state.optimizer)

    def run(self) -> Timing:
        return Timing(ours.load(self._folder, self._state.model, self._state.optimizer))

    def checkpoint(self) -> Path:
        return max(self._folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def _read(folder: Path) -> None:
    for path in disk.files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(_BLOCK):
                pass


def methods(saved: state.State, folder: Path, *, warm: bool) -> list[Method]:
    own = folder / f"raw-{dist.get_rank()}"
    own.mkdir()
    expected = saved.digests()
    limits = [
        raw.RawRead(own, saved.nbytes // dist.get_world_size(), threads, cached=warm) for threads in (2, 4)
    ]
    for method in limits:
        method.name += " a rank"
    return [
        *limits,
        LastcallLoad("lastcall", Kind.OURS, saved, folder, expected, warm),
        ReaderLoad("dcp.load, lastcall.dcp.Reader", Kind.ASIDE, saved, folder, expected, warm),
        DcpLoad("dcp.load, FileSystemReader", Kind.PEER, saved, folder, expected, warm),
    ]
