"""What some code would write as a checkpoint, as file layouts, without its large tensors passing through a
file.

    with Recorder(scratch) as recorder:
        trainer._save_checkpoint(...)
    files = recorder.files()

torch.save and safetensors' save_file leave only a short marker where they were told to write, and the layout
of the file in the recorder. The marker is what makes a renamed, copied, deleted or overwritten file what it
would have been with the real bytes in it. Everything else below the folder is a file like any other, and is
taken as it lies there.

The pickles are made as torch.save makes them, by the standard pickler with storages kept aside, so that any
object that torch.save takes is taken here too. Discarded: a tree of formats.torchzip.Tensor, which holds no
class but the plain ones.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import secrets
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import torch

from lastcall import errors, memory, types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.recorded_save import diverting
from lastcall.adapters.torch.recorded_save.boundary_buffers import BoundaryBuffers
from lastcall.adapters.torch.tensors import cuda, dtypes, tensors
from lastcall.formats import layouts, safetensors, torchzip

SMALL = 4 << 20  # bytes: a file below that is read into memory, a larger one is read when it is written
_MARK = b"recorded by lastcall "
_MARKED = len(_MARK) + 32
_CODES = {
    **dtypes.CODES,
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    **({torch.float8_e8m0fnu: "F8_E8M0"} if hasattr(torch, "float8_e8m0fnu") else {}),
}


class FileSource:
    """The bytes of a file, for as long as it is wanted: removing its name does not take them away."""

    __slots__ = ("__weakref__", "_fd", "nbytes", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self.nbytes = os.fstat(self._fd).st_size

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        view = memory.view(address, nbytes)
        while view:
            count = os.preadv(self._fd, [view], offset)
            if count == 0:
                raise errors.StateError(
                    f"{self.path} ends at byte {offset}, but it had {self.nbytes} when it was recorded"
                )
            view, offset = view[count:], offset + count


@dataclasses.dataclass(frozen=True)
class _Recorded:
    layout: types.FileLayout
    tensors: dict[str, torch.Tensor]


class Recorder:
    """Active on the thread that entered it, for paths below `scratch`. The layouts read the live tensors when
    they are written; what the code made only for the file (a copy on the host, a contiguous copy) stays alive
    as long as its layout. `buffers`: written as they were at a boundary."""

    def __init__(self, scratch: Path, buffers: BoundaryBuffers | None = None) -> None:
        self._buffers = buffers or BoundaryBuffers()
        self.scratch = Path(os.path.realpath(scratch))
        self._recorded: dict[bytes, _Recorded] = {}  # by what its marker says
        self._devices = False  # something of it lies on a device

    def __enter__(self) -> Recorder:
        diverting.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        diverting.end(self)
        if self._devices:
            # what the code has just made for the file is launched, but not yet there: copies wait for it
            cuda.fence()

    def files(self) -> tuple[types.FileLayout, ...]:
        """All files below the folder, by name. Empty folders are none."""
        return tuple(
            self._taken(name, path) if one is None else dataclasses.replace(one.layout, name=name)
            for name, path, one in self._found()
        )

    def tensors(self) -> list[tuple[str, str, torch.Tensor]]:
        """File, key and tensor of all that went to save_file."""
        return [
            (name, key, tensor)
            for name, _, one in self._found()
            if one is not None
            for key, tensor in one.tensors.items()
        ]

    def take_pickle(self, path: str, obj: object) -> bool:
        if not self._is_below(path):
            return False
        pickler = _Pickler()
        try:
            pickler.dump(obj)
        except _Unreadable:
            return False
        sources = [
            self._buffers.source(storage.data_ptr(), storage.nbytes()) or _source(storage)
            for storage in pickler.storages
        ]
        self._devices |= any(storage.device.type == "cuda" for storage in pickler.storages)
        layout = torchzip.archive(path, pickler.out.getvalue(), sources, crc=not sources)
        return self._keep(path, _Recorded(layout if sources else _settled(layout), {}))

    def take_tensors(self, path: str, found: object, metadata: object) -> bool:
        """Tensors that share memory are taken though save_file refuses them, each with all of its bytes; so
        are those that are not contiguous."""
        if (
            not self._is_below(path)
            or not isinstance(found, dict)
            or not _are_plain(found)
            or not _are_texts(metadata)
        ):
            return False
        entries = [
            types.TensorEntry(name, _CODES[tensor.dtype], tuple(tensor.shape), self._source(tensor))
            for name, tensor in found.items()
        ]
        self._devices |= any(tensor.device.type == "cuda" for tensor in found.values())
        return self._keep(path, _Recorded(safetensors.layout(path, entries, metadata), dict(found)))

    def _source(self, tensor: torch.Tensor) -> types.Source:
        known = self._buffers.source(tensor.data_ptr(), tensor.nbytes) if tensor.is_contiguous() else None
        return known or tensors.source(tensor)

    def _is_below(self, path: str) -> bool:
        return Path(path).is_relative_to(self.scratch)

    def _keep(self, path: str, recorded: _Recorded) -> bool:
        marker = _MARK + secrets.token_hex(16).encode()
        try:
            Path(path).write_bytes(marker)
        except OSError:
            return False  # no such folder, for example: the called function says so in its own words
        self._recorded[marker] = recorded
        return True

    def _found(self) -> list[tuple[str, Path, _Recorded | None]]:
        found = []
        for folder, _, names in os.walk(self.scratch):
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    found.append((path.relative_to(self.scratch).as_posix(), path, self._marked(path)))
        return sorted(found, key=lambda item: item[0])

    def _marked(self, path: Path) -> _Recorded | None:
        return self._recorded.get(path.read_bytes()) if path.stat().st_size == _MARKED else None

    def _taken(self, name: str, path: Path) -> types.FileLayout:
        source: types.Source = (
            FileSource(path) if path.stat().st_size >= SMALL else memory.BytesSource(path.read_bytes())
        )
        return types.FileLayout(name, source.nbytes, (types.Extent(0, source),) if source.nbytes else ())


class _Unreadable(Exception):
    """A storage whose bytes cannot be read in place, or one that torch.save refuses: torch.save's own
    business."""


class _Pickler(pickle.Pickler):
    """A pickle as torch.save makes it, with its storages kept aside in the order of their keys."""

    def __init__(self) -> None:
        self.out = io.BytesIO()
        self.storages: list[torch.UntypedStorage] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        super().__init__(self.out, protocol=torch.serialization.DEFAULT_PROTOCOL)

    def persistent_id(self, obj: Any) -> tuple[str, object, str, str, int] | None:
        storage: Any
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, count = obj._untyped_storage, obj.dtype, obj._size()  # type: ignore[no-untyped-call]
            kind = getattr(torch, obj._pickle_storage_type())  # type: ignore[no-untyped-call]
        elif torch.is_storage(obj):
            storage, dtype, count = obj, torch.uint8, obj.nbytes()
            kind = torch.serialization.normalize_storage_type(type(obj))  # type: ignore[no-untyped-call]
        else:
            return None
        if storage.device.type not in ("cpu", "cuda") or getattr(obj, "_fake_device", None) is not None:
            raise _Unreadable
        # A reader makes one storage of each key, of the type that it met first.
        if storage.data_ptr() and self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise _Unreadable
        if storage._cdata not in self._keys:
            self._keys[storage._cdata] = str(len(self.storages))
            self.storages.append(storage)
        return "storage", kind, self._keys[storage._cdata], torch.serialization.location_tag(storage), count


def _source(storage: torch.UntypedStorage) -> types.Source:
    if storage.device.type == "cpu":
        return memory.HostMemory(storage.data_ptr(), storage.nbytes(), storage)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensors.source(flat.set_(storage, 0, (storage.nbytes(),), (1,)))


def _settled(layout: types.FileLayout) -> types.FileLayout:
    """Of one piece: each extent costs the writer a call."""
    return dataclasses.replace(
        layout, extents=(types.Extent(0, memory.BytesSource(layouts.materialize(layout))),)
    )


def _are_plain(found: dict[Any, Any]) -> bool:
    """False for what save_file refuses, or would have to turn into something else before it writes."""
    return all(
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and tensors.problem(tensor) is None
        and tensor.dtype in _CODES
        for name, tensor in found.items()
    ) and not any(placement.is_dtensor(tensor) for tensor in found.values())


def _are_texts(metadata: object) -> TypeGuard[dict[str, str] | None]:
    if metadata is None:
        return True
    return isinstance(metadata, dict) and all(
        isinstance(text, str) for pair in metadata.items() for text in pair
    )
