"""Device state to durable: what is copied to the host on the way, and how far that is hidden behind the
disk."""

from __future__ import annotations

from pathlib import Path

import torch

from bench import disk, peers, raw, save, state
from bench.measure import Kind, Method, Options, interleave
from bench.table import Comparison, Listing

_RING = 256 << 20


class CopyToPinned(Method):
    """The state through a ring of pinned memory, which exists beforehand: pinning costs more than the
    copy."""

    def __init__(self, saved: state.State) -> None:
        super().__init__("raw copy to pinned memory, no disk", Kind.ASIDE)
        self._state = saved

    def setup(self) -> None:
        self._ring = torch.empty(_RING, dtype=torch.uint8, pin_memory=True)

    def run(self) -> None:
        for tensor in self._state.tensors().values():
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _RING):
                piece = flat[start : start + _RING]
                self._ring[: piece.numel()].copy_(piece, non_blocking=True)
        torch.cuda.synchronize()

    def close(self) -> None:
        self.__dict__.pop("_ring", None)


def gpu(folder: Path, gigabytes: float, options: Options) -> Comparison | Listing:
    if not torch.cuda.is_available():
        report = Listing("gpu", "Save from a GPU", ("what",))
        report.notes.append("skipped: this machine has no CUDA device, or this torch is built without CUDA")
        return report
    saved = state.gpt(gigabytes, device="cuda")
    disk.require(folder, (3 + save.ON_DISK) * saved.nbytes)
    methods = [
        *raw.writes(folder, saved.nbytes),
        CopyToPinned(saved),
        save.LastcallSave(saved, folder),
        peers.TorchSave(saved, folder),
        peers.SafetensorsSave(saved, folder),
        *(peers.DcpSave(saved, folder, threads) for threads in (4, 8)),
    ]

    def touch() -> None:
        saved.touch()
        torch.cuda.synchronize()

    results = interleave("gpu", methods, options, before_each=touch)
    title = f"Save from {torch.cuda.get_device_name()}: {saved.described}"
    return Comparison("gpu", title, saved.nbytes, results)
