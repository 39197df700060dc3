"""Bytes of CUDA tensors, copied piece by piece on a side stream of each thread.

The side stream waits for the latest `fence()` and for nothing else: work that the training thread launches
afterwards, a hung collective included, does not hold a save up. Without a fence it waits for what is on the
default stream then.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import torch

from lastcall.adapters.torch.tensors import strided

_fences: dict[int, torch.cuda.Event] = {}
# devices that hold state: recording an event on any other one would make a context there
_used: set[int] = set()
_mine = threading.local()


def fence() -> None:
    """Everything launched up to now on the current streams belongs to the state; copies wait for it, for
    nothing later.

    Called by the training thread. No device is waited for here.
    """
    for device in tuple(_used):
        event = _fences.get(device)
        if event is None:
            event = _fences[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # recorded again: making an event costs more than the whole step's hooks
        event.record(torch.cuda.current_stream(device))


def settle() -> None:
    """Wait for all devices: before live tensors are written to, nothing launched may still use their
    memory."""
    for device in tuple(_used):
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _side(device: int) -> Iterator[torch.cuda.Stream]:
    streams: dict[int, torch.cuda.Stream] = _mine.__dict__.setdefault("streams", {})
    stream = streams.get(device)
    if stream is None:
        stream = streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    event = _fences.get(device)
    if event is not None:
        stream.wait_event(event)
    else:
        stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield stream
        stream.synchronize()


def _host(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous device tensor. By its storage, since view(dtype) does not know every element
    type."""
    nbytes = tensor.numel() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (nbytes,), (1,)
    )


class DeviceMemory:
    """The bytes of a CUDA tensor in C order, both a Source and a Target."""

    __slots__ = ("_device", "_flat", "_walk", "nbytes", "owner")

    def __init__(self, tensor: torch.Tensor, owner: object) -> None:
        tensor = tensor.detach()
        self.nbytes = tensor.numel() * tensor.element_size()
        self.owner = owner
        self._device = tensor.device.index or 0
        _used.add(self._device)
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self._flat = _flat(tensor) if plain else None
        self._walk = None if plain else strided.Strided(tensor, tensor.element_size())

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        with _side(self._device):
            if self._flat is not None:
                _host(address, nbytes).copy_(self._flat[offset : offset + nbytes], non_blocking=True)
            elif self._walk is not None:
                self._walk.each(address, offset, nbytes, _gather)

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        with _side(self._device):
            if self._flat is not None:
                self._flat[offset : offset + nbytes].copy_(_host(address, nbytes), non_blocking=True)
            elif self._walk is not None:
                self._walk.each(address, offset, nbytes, _scatter)


def _gather(view: torch.Tensor, skip: int, nbytes: int, address: int) -> None:
    packed = _flat(torch.empty(view.shape, dtype=view.dtype, device=view.device).copy_(view))
    # waits: the edge lock must not be let go before the bytes are there
    _host(address, nbytes).copy_(packed[skip : skip + nbytes])


def _scatter(view: torch.Tensor, skip: int, nbytes: int, address: int) -> None:
    packed = torch.empty(view.shape, dtype=view.dtype, device=view.device)
    if nbytes < view.numel() * view.element_size():
        packed.copy_(view)
    _flat(packed)[skip : skip + nbytes].copy_(_host(address, nbytes))
    view.copy_(packed)
    if nbytes < view.numel() * view.element_size():
        torch.cuda.current_stream(view.device).synchronize()
