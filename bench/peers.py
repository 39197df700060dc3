"""What people use today, made durable: fsync of the files and of their directory is added where they leave it
out.

DCP is given its flat dictionary of tensors and no process group, which is its best case; it gets one, two and
four threads, and the table shows the fastest.
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bench import disk
from bench.measure import Kind, Method, Timing
from bench.state import State

# Said at each call without a process group, which is what is meant here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


class _Saves(Method):
    """One checkpoint a run, in a folder that is removed afterwards."""

    def __init__(
        self, name: str, state: State, folder: Path, family: str | None = None, kind: Kind = Kind.PEER
    ) -> None:
        super().__init__(name, kind, family)
        self._state = state
        self._folder = folder / "".join(c if c.isalnum() else "-" for c in name)

    def before(self) -> None:
        self._folder.mkdir()

    def after(self) -> None:
        disk.clear(self._folder)

    def _make_durable(self) -> None:
        for path in disk.files(self._folder):
            disk.fsync(path)
        disk.fsync(self._folder)
        disk.fsync(self._folder.parent)


class TorchSave(_Saves):
    def __init__(self, state: State, folder: Path) -> None:
        super().__init__("torch.save + fsync", state, folder)

    def run(self) -> None:
        torch.save(self._state.nested(), self._folder / "state.pt")
        self._make_durable()


class TorchSaveTrained(_Saves):
    """What a careful LoRA script saves: the adapter and its optimizer. Not a peer: the file is no use without
    the base weights."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__("torch.save + fsync, adapter only", state, folder, kind=Kind.ASIDE)

    def run(self) -> None:
        nested = self._state.nested()
        names = {name for name, parameter in self._state.model.named_parameters() if parameter.requires_grad}
        model = self._state.model.state_dict()
        nested["model"] = {name: model[name] for name in names}
        torch.save(nested, self._folder / "adapter.pt")
        self._make_durable()


class SafetensorsSave(_Saves):
    def __init__(self, state: State, folder: Path) -> None:
        super().__init__("safetensors save_file + fsync", state, folder)

    def run(self) -> None:
        save_file(self._state.tensors(), self._folder / "state.safetensors")
        self._make_durable()


class DcpSave(_Saves):
    def __init__(self, state: State, folder: Path, threads: int) -> None:
        super().__init__(f"DCP save, {threads} thread{'s' if threads > 1 else ''}", state, folder, "DCP save")
        self._threads = threads

    def setup(self) -> None:
        """Its first call imports and checks; that is not what is compared."""
        self._folder.mkdir()
        dcp.save({"x": torch.zeros(1)}, checkpoint_id=self._folder, no_dist=True)
        disk.clear(self._folder)

    def run(self) -> None:
        writer = dcp.FileSystemWriter(self._folder, sync_files=True, thread_count=self._threads)
        dcp.save(self._state.tensors(), storage_writer=writer, no_dist=True)
        disk.fsync(self._folder)
        disk.fsync(self._folder.parent)


class DcpAsyncSave(_Saves):
    """`stall` asks for the time until training may change the state again, otherwise the time until it is
    durable counts."""

    def __init__(self, state: State, folder: Path, *, cached: bool = False, stall: bool = False) -> None:
        super().__init__(f"DCP async_save, {'cached' if cached else 'default'} stager", state, folder)
        self._cached = cached
        self._stall = stall
        self._stager: DefaultStager | None = None

    def setup(self) -> None:
        if self._cached:
            self._stager = DefaultStager(StagingOptions(*[torch.cuda.is_available()] * 4))
            self._stager_warmed()

    def run(self) -> Timing:
        start = time.perf_counter()
        writer = dcp.FileSystemWriter(self._folder, sync_files=True, thread_count=4)
        answer: Any = dcp.async_save(
            self._state.tensors(), storage_writer=writer, async_stager=self._stager, no_dist=True
        )
        upload = answer
        if not isinstance(answer, Future):
            answer.staging_completion.result()
            upload = answer.upload_completion
        returned = time.perf_counter() - start
        upload.result()
        disk.fsync(self._folder)
        disk.fsync(self._folder.parent)
        durable = time.perf_counter() - start
        return Timing(returned) if self._stall else Timing(durable, returned)

    def close(self) -> None:
        if self._stager:
            self._stager.close()
            self._stager = None

    def _stager_warmed(self) -> None:
        """Its first copy allocates; the later ones are what it is used for."""
        assert self._stager is not None
        staged: Any = self._stager.stage(self._state.tensors())
        if isinstance(staged, Future):
            staged.result()


def saves(state: State, folder: Path) -> list[Method]:
    return [
        TorchSave(state, folder),
        SafetensorsSave(state, folder),
        *(DcpSave(state, folder, threads) for threads in (1, 2, 4)),
        DcpAsyncSave(state, folder),
    ]
