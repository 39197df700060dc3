"""Writer: a StorageWriter for `torch.distributed.checkpoint.save` and `async_save`.

    dcp.save(state_dict, storage_writer=lastcall.dcp.Writer("checkpoints/step-1000"))

Every rank writes one safetensors file into a staging folder beside the target. When all are durable the
coordinator adds the manifest, the document and the commit record, and gives the folder its name: a reader
finds the whole checkpoint, the one before it, or none.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lastcall import errors, types
from lastcall.adapters.torch.dcp import engines, folders, publishing, splitting, values
from lastcall.adapters.torch.tensors import cuda, dtypes, tensors
from lastcall.core.checkpoint import filenames
from lastcall.core.restore import inventory
from lastcall.formats import manifest, safetensors


@dataclass(frozen=True)
class Task:
    """What the coordinator tells a rank along with its plan."""

    rank: int
    staging: str
    wholes: Mapping[MetadataIndex, WriteItem]


@dataclass(frozen=True)
class Box:
    """What a rank tells the coordinator of a tensor: its type and the whole's shape as stored, and the piece,
    unless it is empty."""

    dtype: str
    shape: tuple[int, ...]
    piece: manifest.Piece | None
    true: str | None  # the name of an element type that safetensors lacks


@dataclass(frozen=True)
class Value:
    """... and of a value that is no tensor."""

    document: object


class Writer(StorageWriter):
    """Writes a state dict as a lastcall checkpoint at `path`, with `threads` threads a rank.

    `sync`: make the files durable before the checkpoint appears. `overwrite`: replace a checkpoint that is
    there, in one atomic step; with False it is refused, and so is in any case what is not a checkpoint of
    lastcall.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, threads: int = 16, sync: bool = True, overwrite: bool = True
    ) -> None:
        super().__init__()
        if threads < 1:
            raise ValueError(f"threads={threads}: a writer needs one or more")
        folders.teach()
        self.path = _absolute(path)
        self.threads = threads
        self.sync = sync
        self.overwrite = overwrite
        self._coordinator = False
        self._staging: Path | None = None
        self._began = 0.0

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = _absolute(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # ---- planning ------------------------------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise errors.SaveError(
                "use_collectives=False would let every rank write a checkpoint of its own, and lastcall "
                "commits one for all. "
                "Leave it out, or use torch's FileSystemWriter."
            )
        self._coordinator = is_coordinator
        self._began = time.monotonic()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._coordinator:
            publishing.check(self.path, overwrite=self.overwrite)
        return dataclasses.replace(plan, storage_data=splitting.held(plan))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._staging = publishing.stage(self.path)
        return [
            dataclasses.replace(
                plan, items=portion.items, storage_data=Task(rank, self._staging.name, portion.wholes)
            )
            for rank, (plan, portion) in enumerate(zip(plans, splitting.even(plans), strict=True))
        ]

    # ---- writing -------------------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        task: Task = plan.storage_data
        folder = publishing.find(self.path, task.staging)
        file = filenames.tensors(inventory.DCP, task.rank)
        results: list[WriteResult] = []
        entries: dict[str, types.TensorEntry] = {}
        live: list[torch.Tensor] = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                results.append(WriteResult(item.index, 0, Value(_value(item, planner))))
                continue
            tensor = _tensor(item, planner, task.wholes)
            box = _box(item, tensor, file, entries)
            results.append(WriteResult(item.index, tensor.nbytes, box))
            if box.piece is not None:
                live.append(tensor)
                entries[box.piece.key] = types.TensorEntry(
                    box.piece.key, box.dtype, box.piece.shape, tensors.source(tensor)
                )
        if entries:
            cuda.fence()
            layout = safetensors.layout(file, tuple(entries.values()), {"format": "pt"})
            written = publishing.write(folder, [layout], engines.engine(self.threads, live), sync=self.sync)
            results += [WriteResult(MetadataIndex(record.name), record.size, record) for record in written]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._staging is not None
        told = [(result.index.fqn, result.storage_data) for ranks in results for result in ranks]
        document = {
            "format": 1,
            inventory.DCP: {
                "values": {name: found.document for name, found in told if isinstance(found, Value)},
                "dtypes": {
                    name: found.true
                    for name, found in told
                    if isinstance(found, Box) and found.true is not None
                },
                "paths": _paths(metadata.planner_data),
            },
        }
        publishing.publish(
            self._staging,
            self.path,
            publishing.Completion(
                files=[found for _, found in told if isinstance(found, types.FileRecord)],
                manifest=manifest.merge(
                    _described(name, found) for name, found in told if isinstance(found, Box)
                ),
                document=document,
                world=len(results),
                seconds=time.monotonic() - self._began,
            ),
            sync=self.sync,
        )
        self._staging = None


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Through links, as torch's own writer would go: the folder itself is replaced, and a link to it is
    not."""
    return Path(os.path.realpath(path))


def _value(item: WriteItem, planner: SavePlanner) -> object:
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise errors.StateError(
            f"{item.index.fqn}: {type(planner).__name__} offers values that are no tensors only as bytes, "
            "which would have to be "
            "unpickled. Use a planner with lookup_object(), such as DefaultSavePlanner."
        )
    return values.encode(look_up(item.index), item.index.fqn)


def _tensor(item: WriteItem, planner: SavePlanner, wholes: Mapping[MetadataIndex, WriteItem]) -> torch.Tensor:
    whole = wholes.get(item.index, item)
    tensor = planner.resolve_data(whole)
    assert isinstance(tensor, torch.Tensor) and whole.tensor_data is not None
    tensors.check(tensor, item.index.fqn)
    if tensor.shape != whole.tensor_data.chunk.sizes:
        raise errors.SaveError(
            f"{item.index.fqn}: the planner announced {list(whole.tensor_data.chunk.sizes)} and came with "
            f"{list(tensor.shape)}"
        )
    return splitting.narrowed(tensor.detach(), item, wholes)


def _box(item: WriteItem, tensor: torch.Tensor, file: str, taken: Mapping[str, object]) -> Box:
    data = item.tensor_data
    assert data is not None
    code, shape = dtypes.stored_as(tensor.dtype, tuple(tensor.shape))
    _, whole = dtypes.stored_as(tensor.dtype, tuple(data.size))
    true = dtypes.name_of(tensor.dtype) if len(shape) > tensor.dim() else None
    if not tensor.numel():
        return Box(code, whole, None, true)
    offset = (*data.chunk.offsets, *(0,) * (len(shape) - tensor.dim()))
    key = item.index.fqn if shape == whole else manifest.key(item.index.fqn, offset)
    # a tensor may be called what a part of another is, and safetensors keeps one name
    while key in taken or key == "__metadata__":
        key += "~"
    return Box(code, whole, manifest.Piece(file, key, offset, shape), true)


def _described(name: str, box: Box) -> manifest.Description:
    pieces = (
        [{**box.piece._asdict(), "offset": list(box.piece.offset), "shape": list(box.piece.shape)}]
        if box.piece
        else []
    )
    return {inventory.DCP: {name: {"dtype": box.dtype, "shape": list(box.shape), "pieces": pieces}}}


def _paths(found: object) -> dict[str, list[str | int]] | None:
    """Where each flattened name stood in the nested state dict, as DCP's own planner notes it; what another
    one notes is not kept."""
    if not isinstance(found, dict):
        return None
    paths: dict[str, list[str | int]] = {}
    for name, path in found.items():
        if (
            type(name) is not str
            or not isinstance(path, tuple)
            or any(type(part) not in (str, int) for part in path)
        ):
            return None
        paths[name] = list(path)
    return paths
