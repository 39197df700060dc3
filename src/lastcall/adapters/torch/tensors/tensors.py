"""Tensors as sources and targets of bytes, in C order, without a copy of the whole."""

from __future__ import annotations

import ctypes

import torch

from lastcall import errors, memory, types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.tensors import cuda, strided


class HostStrided:
    """A host tensor that is not in C order."""

    __slots__ = ("_walk", "nbytes", "owner")

    def __init__(self, tensor: torch.Tensor, owner: object) -> None:
        self._walk = strided.Strided(tensor.detach(), tensor.element_size())
        self.nbytes = self._walk.nbytes
        self.owner = owner

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        self._walk.each(address, offset, nbytes, _gather)

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        self._walk.each(address, offset, nbytes, _scatter)


def _gather(view: torch.Tensor, skip: int, nbytes: int, address: int) -> None:
    packed = _packed(view)
    ctypes.memmove(address, packed.data_ptr() + skip, nbytes)


def _scatter(view: torch.Tensor, skip: int, nbytes: int, address: int) -> None:
    packed = (
        _packed(view)
        if nbytes < view.numel() * view.element_size()
        else torch.empty(view.shape, dtype=view.dtype)
    )
    ctypes.memmove(packed.data_ptr() + skip, address, nbytes)
    with torch.no_grad():
        view.copy_(packed)


def _packed(view: torch.Tensor) -> torch.Tensor:
    packed = torch.empty(view.shape, dtype=view.dtype)
    with torch.no_grad():
        return packed.copy_(view)  # and not .contiguous(): conjugate views are resolved here too


Aim = types.Target | types.Region  # where a stored tensor goes: all of it, or a piece


class Several:
    """One stored tensor that goes to several live ones: it was shared when it was saved and is not now. A
    Target only where none of them takes a mere piece; a reader of pieces looks at `targets`."""

    __slots__ = ("targets",)

    def __init__(self, targets: tuple[Aim, ...]) -> None:
        self.targets: tuple[Aim, ...] = tuple(
            inner
            for target in targets
            for inner in (target.targets if isinstance(target, Several) else (target,))
        )

    @property
    def nbytes(self) -> int:
        return self._wholes()[0].nbytes

    def write_from(self, address: int, offset: int, nbytes: int) -> None:
        for target in self._wholes():
            target.write_from(address, offset, nbytes)

    def _wholes(self) -> list[types.Target]:
        wholes = [target for target in self.targets if not isinstance(target, types.Region)]
        assert len(wholes) == len(self.targets), "a piece of a tensor does not take the whole"
        return wholes


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its expanded (stride 0) dimensions narrowed to one: what is really in memory. A DTensor
    is never expanded."""
    if placement.is_dtensor(tensor) or 0 not in tensor.stride():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def address(tensor: torch.Tensor) -> int:
    """Where a tensor, or what this rank has of it, lies in memory. A DTensor itself has no address: asking
    for it raises."""
    return placement.local(tensor).data_ptr()


def of(tensor: torch.Tensor, keep: object = None) -> memory.HostMemory | HostStrided | cuda.DeviceMemory:
    """The bytes of a tensor, both a Source and a Target, in C order. Expanded tensors are to be made dense()
    before.

    `keep` is held as long as the result is: whatever would give the memory to somebody else when it dies.
    """
    kept = (tensor, keep)
    if tensor.device.type == "cuda":
        return cuda.DeviceMemory(tensor, kept)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return memory.HostMemory(tensor.data_ptr(), tensor.nbytes, kept)
    return HostStrided(tensor, kept)


def source(tensor: torch.Tensor, keep: object = None) -> types.Source:
    return of(tensor, keep)


def target(tensor: torch.Tensor) -> types.Target:
    return of(tensor)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A small device tensor on the host, without waiting for anything but its own copy."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    of(tensor).read_into(host.data_ptr(), 0, tensor.nbytes)
    return host


def check(tensor: torch.Tensor, path: str) -> None:
    """Refuse tensors whose bytes cannot be read or written in place."""
    found = problem(tensor)
    if found is not None:
        what, remedy = found
        raise errors.StateError(f"{path}: {what} cannot be saved. {remedy}")


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_DEVICES = frozenset({"cpu", "cuda"})


def problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why a tensor cannot be saved, and what to do, or None."""
    kind = type(tensor)
    if (
        kind in _PLAIN
        and tensor.device.type in _DEVICES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    ):
        return None  # nearly all of them
    if torch.nn.parameter.is_lazy(tensor):
        return (
            "a parameter that has no shape yet",
            "Run one batch through the module before calling protect().",
        )
    name = kind.__name__
    if placement.is_dtensor(tensor):
        return placement.problem(tensor) or _local_problem(tensor._local_tensor)
    if name == "FakeTensor" or tensor.device.type == "meta":
        return (
            f"a {'FakeTensor' if name == 'FakeTensor' else 'tensor on the meta device'}",
            "It has no bytes: materialise it first (module.to_empty(device=...)).",
        )
    if tensor.is_nested:
        return "a nested tensor", "Pass the list of its parts (tensor.unbind())."
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})", "Pass tensor.to_dense(), or its indices() and values()."
    if tensor.is_quantized:
        return "a quantized tensor", "Pass its int_repr() with its scale and zero point."
    if tensor.device.type not in _DEVICES:
        return f"a tensor on {tensor.device}", "Only cpu and cuda tensors can be saved: pass tensor.cpu()."
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {name} (a tensor subclass with its own behaviour)", "Pass the plain tensors inside it."
    return None


def _local_problem(local: torch.Tensor) -> tuple[str, str] | None:
    if tuple(dense(local).shape) != tuple(local.shape):
        return "a DTensor whose local tensor is expanded", "Pass DTensor.from_local(local.contiguous(), ...)."
    return problem(local)
