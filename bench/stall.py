"""How long a periodic save keeps training from going on, against a plain copy of the state and DCP's
async_save.

What runs on in the background afterwards is waited for outside of the time, but inside the CPU seconds and
the memory.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from bench import disk, ours, peers, state
from bench.measure import Kind, Method, Options, Timing, interleave
from bench.table import Comparison


class Memcpy(Method):
    """The state into memory that was touched before: what any saver that lets training go on has to do."""

    def __init__(self, saved: state.State, *, by_torch: bool) -> None:
        how = f"torch copy_, {torch.get_num_threads()} threads" if by_torch else "one thread"
        super().__init__(f"memcpy, {how}", Kind.LIMIT)
        self._state = saved
        self._by_torch = by_torch

    def before(self) -> None:
        self._pairs = [(torch.zeros_like(tensor), tensor) for tensor in self._state.tensors().values()]

    def run(self) -> None:
        for copy, tensor in self._pairs:
            if self._by_torch:
                copy.copy_(tensor)
            else:
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)

    def after(self) -> None:
        self._pairs = []


class LastcallStall(Method):
    def __init__(self, saved: state.State, folder: Path) -> None:
        super().__init__("lastcall, periodic save", Kind.OURS)
        self._state = saved
        self._folder = folder / "lastcall"
        self._periodic: ours.Periodic | None = None

    def setup(self) -> None:
        self._periodic = ours.Periodic(self._folder, self._state.model, self._state.optimizer)
        for _ in range(2):  # the first copy of a run allocates its memory
            self._state.touch()
            self._periodic.stall()
            self._periodic.wait()

    def run(self) -> Timing:
        assert self._periodic is not None
        stalled = self._periodic.stall()
        self._periodic.wait()
        return Timing(stalled)

    def close(self) -> None:
        if self._periodic:
            self._periodic.close()
            self._periodic = None
        disk.clear(self._folder)


def stall(folder: Path, gigabytes: float, options: Options) -> Comparison:
    saved = state.gpt(gigabytes)
    disk.require(folder, 5 * saved.nbytes)
    methods = [
        Memcpy(saved, by_torch=False),
        Memcpy(saved, by_torch=True),
        LastcallStall(saved, folder),
        peers.DcpAsyncSave(saved, folder, stall=True),
        peers.DcpAsyncSave(saved, folder, cached=True, stall=True),
    ]
    results = interleave("stall", methods, options, before_each=saved.touch)
    title = f"Stall of a periodic save: {saved.described}"
    return Comparison("stall", title, saved.nbytes, results, limit="plain memcpy")
