"""Reader: a StorageReader for `torch.distributed.checkpoint.load`.

    dcp.load(state_dict, storage_reader=lastcall.dcp.Reader("checkpoints/step-1000"))

It reads what Writer wrote, and the tensors of what protect() saved, on any number of ranks and into any
sharding: DCP's planner says which regions a rank needs, and only the chunks of the files that hold them are
read, each checked against its digest first.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lastcall import errors
from lastcall.adapters.torch.dcp import engines, folders, values
from lastcall.adapters.torch.tensors import cuda, dtypes, tensors
from lastcall.core.restore.inventory import Inventory, Place
from lastcall.types import Region

_BY_CODE = {code: dtype for dtype, code in dtypes.CODES.items()}
Target = tuple[Place, Region]


class Reader(StorageReader):
    """Reads the lastcall checkpoint at `path`, with `threads` threads a rank."""

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 16) -> None:
        super().__init__()
        if threads < 1:
            raise ValueError(f"threads={threads}: a reader needs one or more")
        folders.teach()
        self.path = Path(path)
        self.threads = threads
        self._found: Inventory | None = None
        self._places: dict[str, Place] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self._found = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    # ---- what is there -------------------------------------------------------------------------------------

    def read_metadata(self, *args: Any, **more: Any) -> Metadata:
        # `more` and not `kwargs`: by that name DCP would take it that each rank may have metadata of its own.
        folders.check(self.path)
        found = self._found = Inventory(self.path)
        self._places = found.named()
        odd = _object(found.dcp, "dtypes")
        self._dtypes = {
            name: _dtype(name, found.tensor(place).dtype, odd.get(name))
            for name, place in self._places.items()
        }
        described: dict[str, STORAGE_TYPES] = {name: self._describe(name, found) for name in self._places}
        described.update((name, BytesStorageMetadata()) for name in _object(found.dcp, "values"))
        paths = _paths(found.dcp, described) if found.dcp is not None else _nested(found)
        return Metadata(
            described,
            planner_data=paths,
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def _describe(self, name: str, found: Inventory) -> TensorStorageMetadata:
        dtype, place = self._dtypes[name], self._places[name]
        stored = found.tensor(place)
        more = _more(dtype)
        if dtypes.stored_as(dtype, stored.shape[: len(stored.shape) - more]) != (stored.dtype, stored.shape):
            raise errors.CheckpointError(
                f"{name!r:.120} is stored as {stored.dtype}{list(stored.shape)}, which is not how {dtype} is"
            )
        boxes = [
            (offset[: len(offset) - more], shape[: len(shape) - more]) for offset, shape in found.boxes(place)
        ]
        return TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch.Size(stored.shape[: len(stored.shape) - more]),
            [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in boxes],
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    # ---- reading -------------------------------------------------------------------------------------------

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found = self._found
        assert found is not None, "read_metadata() comes first"
        arrivals = [
            _Arrival(item, planner, self._dtypes[item.storage_index.fqn])
            for item in plan.items
            if item.type is LoadItemType.TENSOR
        ]
        cuda.settle()
        engine = engines.engine(self.threads, [arrival.memory for arrival in arrivals])
        found.load(engine, [(self._places[arrival.name], arrival.region) for arrival in arrivals])
        for arrival in arrivals:
            arrival.commit(planner)
        kept = _object(found.dcp, "values")
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, values.as_torch_saved(values.decode(kept[item.storage_index.fqn])))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def to_torch_save(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the whole state dict of a checkpoint, nested as it was saved, into one file for `torch.load()`:
    what `torch.distributed.checkpoint.format_utils.dcp_to_torch_save` does for torch's own folders. It needs
    the memory for all of it."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=Reader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)  # type: ignore[no-untyped-call]
    torch.save(state, file)


class _Arrival:
    """A region on its way into a tensor: straight into its memory where it has the stored type, through a
    copy otherwise."""

    def __init__(self, item: ReadItem, planner: LoadPlanner, dtype: torch.dtype) -> None:
        self.name = item.storage_index.fqn
        self._item = item
        self._live = planner.resolve_tensor(item).detach()
        if self._live.shape != item.lengths:
            raise errors.MismatchError(
                f"{self.name}: {list(item.lengths)} are to be read into a tensor of {list(self._live.shape)}"
            )
        direct = (
            self._live.dtype is dtype and tensors.problem(self._live) is None and 0 not in self._live.stride()
        )
        self.memory = self._live if direct else torch.empty(self._live.shape, dtype=dtype)
        base = item.storage_index.offset or (0,) * len(item.lengths)
        offset = tuple(begin + inside for begin, inside in zip(base, item.storage_offsets, strict=True))
        _, shape = dtypes.stored_as(dtype, tuple(item.lengths))
        self.region = Region((*offset, *(0,) * _more(dtype)), shape, tensors.target(self.memory))

    def commit(self, planner: LoadPlanner) -> None:
        if self.memory is not self._live:
            self._live.copy_(self.memory)
        planner.commit_tensor(self._item, self._live)


def _more(dtype: torch.dtype) -> int:
    """How many dimensions more a type has in the file: one if safetensors lacks it."""
    return len(dtypes.stored_as(dtype, ())[1])


def _dtype(name: str, code: str, true: object) -> torch.dtype:
    if true is not None:
        return dtypes.by_name(true)
    if code not in _BY_CODE:
        raise errors.CheckpointError(
            f"{name!r:.120} has elements of the type {code}, which is not known here"
        )
    return _BY_CODE[code]


def _object(document: Mapping[str, Any] | None, part: str) -> Mapping[str, Any]:
    found = document.get(part) if document is not None else {}
    if not isinstance(found, dict):
        raise errors.CheckpointError(
            f"the part {part!r} of the document is {reprlib.repr(found)}, not an object"
        )
    return found


def _nested(found: Inventory) -> dict[str, tuple[str | int, ...]]:
    return {f"{group}.{name}": (group, name) for group, names in found.groups.items() for name in names}


def _paths(
    document: Mapping[str, Any], described: Mapping[str, object]
) -> dict[str, tuple[str | int, ...]] | None:
    """Where each name stood in the nested state dict. Numbers are places in lists, which DCP fills up to
    there: none may be absurd."""
    if document.get("paths") is None:
        return None
    paths = {}
    for name, path in _object(document, "paths").items():
        right = (
            isinstance(path, list)
            and bool(path)
            and all(type(part) is str or (type(part) is int and 0 <= part < 10**6) for part in path)
        )
        if not right or ".".join(map(str, path)) != name:
            raise errors.CheckpointError(
                f"the document says that {name!r:.120} stood at {reprlib.repr(path)}, which cannot be"
            )
        if name in described:
            paths[name] = tuple(path)
    return paths


def _is_step(part: object) -> bool:
    return type(part) is str or (type(part) is int and 0 <= part < 10**6)
