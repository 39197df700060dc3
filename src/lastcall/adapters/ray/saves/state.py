"""The state of a script that has no save of its own: its optimizers, the modules whose parameters they train,
and the values that were named.

A folder below the run's own, one file for each rank with a state of its own. Tensors and plain values only:
nothing is executed when it is read, and a digest covers every byte.
"""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow.fs
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from lastcall import errors
from lastcall.core.engine import digest

_WRAPPERS = (DataParallel, DistributedDataParallel)


def found() -> tuple[list[nn.Module], list[Optimizer]]:
    """The optimizers of this process that have stepped, and the outermost modules that hold what they
    train."""
    objects = gc.get_objects()
    optimizers = [each for each in objects if issubclass(type(each), Optimizer) and each.state]
    trained = {id(parameter) for optimizer in optimizers for parameter in parameters(optimizer)}
    modules = [
        each for each in objects if issubclass(type(each), nn.Module) and not isinstance(each, _WRAPPERS)
    ]
    holding = [each for each in modules if any(id(parameter) in trained for parameter in each.parameters())]
    inner = {id(child) for each in holding for child in each.modules() if child is not each}
    return [each for each in holding if id(each) not in inner], optimizers


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def alike_on_all_ranks() -> bool:
    """Whether one rank's state is that of all: DDP keeps them equal."""
    return any(issubclass(type(each), DistributedDataParallel) for each in gc.get_objects())


def captured(named: Mapping[str, Any]) -> dict[str, Any]:
    """StateError where a rank holds only parts of tensors."""
    modules, optimizers = ([], []) if named else found()
    if not named and not optimizers:
        raise errors.StateError("no optimizer has stepped: there is nothing to save")
    body = {
        "modules": [{"class": kind(each), "state": each.state_dict()} for each in modules],
        "optimizers": [
            {"class": kind(each), "shapes": shapes(parameters(each)), "state": each.state_dict()}
            for each in optimizers
        ],
        "named": {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in named.items()
        },
    }
    if any(isinstance(tensor, DTensor) for tensor in _tensors(body)):
        raise errors.StateError(
            "the state is sharded over the ranks (FSDP): only the script itself can save it"
        )
    return body


def kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def shapes(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors]


def write(filesystem: Any, folder: str, rank: int, body: Mapping[str, Any]) -> int:
    stream = io.BytesIO()
    torch.save(body, stream)
    data = stream.getvalue()
    filesystem.create_dir(folder, recursive=True)
    _put(filesystem, f"{folder}/{_file(rank)}", data)
    _put(
        filesystem,
        f"{folder}/{_file(rank)}.json",
        json.dumps({"algorithm": digest.ALGORITHM, "digest": digest.of(data)}).encode(),
    )
    return len(data)


def read(filesystem: Any, folder: str, rank: int) -> dict[str, Any]:
    """That of this rank; rank 0's where this one has written none. CheckpointError where its bytes have
    changed."""
    names = {entry.base_name for entry in filesystem.get_file_info(pyarrow.fs.FileSelector(folder))}
    name = _file(rank) if _file(rank) in names else _file(0)
    data, facts = _get(filesystem, f"{folder}/{name}"), json.loads(_get(filesystem, f"{folder}/{name}.json"))
    if digest.named(facts["algorithm"])(data) != facts["digest"]:
        raise errors.CheckpointError(f"{folder}/{name} is damaged")
    body: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return body


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _file(rank: int) -> str:
    return f"rank-{rank}.pt"


def _put(filesystem: Any, path: str, data: bytes) -> None:
    with filesystem.open_output_stream(path) as file:
        file.write(data)


def _get(filesystem: Any, path: str) -> bytes:
    with filesystem.open_input_stream(path) as file:
        return bytes(file.read())
