"""From a cold file to the bytes in the live tensors. Every restore is checked, outside of the time, to have
brought back every byte."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from bench import disk, ours, raw, state
from bench.measure import Kind, Method, Options, Timing, interleave
from bench.table import Comparison


class Restore(Method):
    """Writes its checkpoint once, at the start; each run finds zeroed tensors and an evicted file."""

    def __init__(
        self, name: str, kind: Kind, saved: state.State, folder: Path, expected: dict[str, str]
    ) -> None:
        super().__init__(name, kind)
        self._state = saved
        self._folder = folder / "".join(c if c.isalnum() else "-" for c in name)
        self._expected = expected

    def write(self) -> None:
        raise NotImplementedError

    def setup(self) -> None:
        self._folder.mkdir()
        self.write()

    def before(self) -> None:
        self._state.scribble()
        disk.evict(self._folder)

    def after(self) -> None:
        found = self._state.digests()
        wrong = [name for name, digest in self._expected.items() if found.get(name) != digest]
        if wrong:
            raise RuntimeError(
                f"{len(wrong)} of {len(self._expected)} tensors differ after the restore, {wrong[0]} first"
            )

    def close(self) -> None:
        disk.clear(self._folder)

    def _copy(self, loaded: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._state.tensors().items():
                tensor.copy_(loaded[name])


class TorchLoad(Restore):
    def write(self) -> None:
        torch.save(self._state.nested(), self._folder / "state.pt")

    def run(self) -> None:
        nested = torch.load(self._folder / "state.pt", mmap=True, weights_only=True)
        self._copy(state.flatten(nested))


class SafetensorsLoad(Restore):
    def write(self) -> None:
        save_file(self._state.tensors(), self._folder / "state.safetensors")

    def run(self) -> None:
        self._copy(load_file(self._folder / "state.safetensors"))


class DcpLoad(Restore):
    def write(self) -> None:
        writer = dcp.FileSystemWriter(self._folder, thread_count=4)
        dcp.save(self._state.tensors(), storage_writer=writer, no_dist=True)

    def run(self) -> None:
        dcp.load(self._state.tensors(), storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)


class LastcallRestore(Restore):
    """Digests are checked on the way, which no other row does."""

    def write(self) -> None:
        ours.fill(self._folder, self._state.model, self._state.optimizer)

    def run(self) -> Timing:
        return Timing(ours.load(self._folder, self._state.model, self._state.optimizer))


def resume(folder: Path, gigabytes: float, options: Options) -> Comparison:
    saved = state.gpt(gigabytes)
    disk.require(folder, 8 * saved.nbytes)
    expected = saved.digests()
    methods = [
        *(raw.RawRead(folder, saved.nbytes, threads) for threads in (2, 4)),
        LastcallRestore("lastcall", Kind.OURS, saved, folder, expected),
        TorchLoad("torch.load(mmap=True) + copy", Kind.PEER, saved, folder, expected),
        SafetensorsLoad("safetensors load_file + copy", Kind.PEER, saved, folder, expected),
        DcpLoad("DCP load", Kind.PEER, saved, folder, expected),
    ]
    results = interleave("resume", methods, options)
    report = Comparison("resume", f"Resume, cold: {saved.described}", saved.nbytes, results)
    report.notes.append(
        "Each restore was checked to bring back every byte. Two checkpoints lie in the folder; a single one "
        "is read twice."
    )
    return report
