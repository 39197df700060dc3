"""Which ranks hold which piece of a tensor: DTensors (FSDP2, HSDP, tensor parallelism) and the parameters of
DistributedDataParallel.

Nothing here communicates or looks at a byte: what a mesh, its placements and a process group say is known to
every rank alone. torch.distributed.tensor is not imported (it takes a second, and most runs have no use for
it): a DTensor is known by its type's name.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch.nn.parallel import DistributedDataParallel

from lastcall import errors
from lastcall.types import Share

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

log = logging.getLogger("lastcall")

Holders = tuple[int, ...]
Runs = list[tuple[int, int]]  # [begin, end) of rows, in order
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape

_FSDP = "torch.distributed.fsdp._fully_shard."
# they average over all ranks, but for those of _APART
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_APART = frozenset({"noop_hook", "post_localSGD_hook"})


# ---- DTensors ----------------------------------------------------------------------------------------------


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    return type(tensor).__name__ == "DTensor"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has in memory of a tensor. Not by to_local(): it is differentiable, and so makes new
    tensors."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def problem(tensor: DTensor) -> tuple[str, str] | None:
    """Why a DTensor has no place in a checkpoint, and what to do, or None."""
    found = _placed(tensor)
    return (found.what, found.remedy) if isinstance(found, Problem) else None


def share_of(tensor: DTensor) -> Share:
    """Where the piece of this rank lies in the whole, and who else holds it."""
    found = _placed(tensor)
    if isinstance(found, Problem):
        raise errors.StateError(f"{found.what} cannot be saved. {found.remedy}")
    return found


class Problem(NamedTuple):
    what: str
    remedy: str


def _placed(tensor: DTensor) -> Share | Problem:
    mesh = tensor.device_mesh
    return _computed(
        tuple(tensor.shape),
        tuple(tensor._local_tensor.shape),
        mesh,
        mesh.get_coordinate(),
        tuple(tensor.placements),
    )


@functools.lru_cache(4096)
def _computed(
    shape: tuple[int, ...],
    held: tuple[int, ...],
    mesh: Any,
    coordinate: Sequence[int] | None,
    placements: tuple[Any, ...],
) -> Share | Problem:
    if any(way.is_partial() for way in placements):
        return Problem(
            "a DTensor of partial sums", "Have them added up: tensor.redistribute(placements=[Replicate()])."
        )
    if coordinate is None:
        return Problem(
            "a DTensor on a mesh that this rank is not part of", "Pass it on the ranks that hold it only."
        )
    cuts = [
        (None if way.is_replicate() else getattr(way, "dim", -1), int(getattr(way, "split_factor", 1)))
        for way in placements
    ]
    box = (
        _box(shape, tuple(mesh.shape), tuple(coordinate), cuts)
        if all(dim is None or dim >= 0 for dim, _ in cuts)
        else None
    )
    if box is None:
        return Problem(
            f"a DTensor with the placements {placements}",
            "Pass its rows in one piece: tensor.redistribute().",
        )
    if box[1] != held:
        return Problem(
            f"a DTensor that holds {held} where its placements say {box[1]}",
            "Pass shape= to DTensor.from_local().",
        )
    # The ranks that stand where this one does on every dimension of the mesh that splits the tensor.
    where = tuple(slice(None) if dim is None else at for (dim, _), at in zip(cuts, coordinate, strict=True))
    return Share(shape, box[0], tuple(sorted(mesh.mesh[where].flatten().tolist())))


def mark_of(tensor: DTensor) -> str:
    """What is put behind its name. Ranks outside its mesh may have another tensor of that name (a stage of a
    pipeline)."""
    return mark(_ranks(tensor.device_mesh))


def mark(ranks: Sequence[int]) -> str:
    """As mark_of(), for a group of ranks."""
    return "" if len(ranks) == torch.distributed.get_world_size() else f"~{min(ranks)}"


@functools.lru_cache(64)
def _ranks(mesh: Any) -> Holders:
    return tuple(mesh.mesh.flatten().tolist())


def _box(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: Sequence[tuple[int | None, int]],
) -> Box | None:
    """The piece at a coordinate of the mesh, or None where it is not one box. DCP computes the same (in 70
    µs), but only the beginning: it would take the rows of a _StridedShard that lie apart for neighbours."""
    kept: dict[int, Runs] = {}
    for (dim, factor), size, at in zip(cuts, sizes, coordinate, strict=True):
        if dim is not None:
            runs = kept.get(dim, [(0, shape[dim])])
            kept[dim] = [run for part in range(factor) for run in _cut(_cut(runs, factor, part), size, at)]
    offset, extent = [0] * len(shape), list(shape)
    for dim, runs in kept.items():
        joined = _joined(runs)
        if len(joined) > 1:
            return None
        begin, end = joined[0] if joined else (shape[dim], shape[dim])
        offset[dim], extent[dim] = begin, end - begin
    return tuple(offset), tuple(extent)


def _cut(runs: Runs, parts: int, index: int) -> Runs:
    """The rows that torch.chunk(parts)[index] would take: all parts but the last ones have the same size."""
    total = sum(end - begin for begin, end in runs)
    size = -(-total // parts)
    first, last = min(index * size, total), min((index + 1) * size, total)
    taken, at = [], 0
    for begin, end in runs:
        low, high = max(first, at), min(last, at + end - begin)
        if low < high:
            taken.append((begin + low - at, begin + high - at))
        at += end - begin
    return taken


def _joined(runs: Runs) -> Runs:
    joined: Runs = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


# ---- DistributedDataParallel -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same parameter, by its id. The parameters are kept, so that their ids stay
    theirs."""

    holders: dict[int, Holders] = field(default_factory=dict)
    kept: tuple[torch.Tensor, ...] = ()
    wrappers: tuple[DistributedDataParallel, ...] = ()  # in no order that other ranks would have, too

    def of(self, parameter: torch.Tensor) -> Holders | None:
        return self.holders.get(id(parameter))


def replicas() -> Replicas:
    """The parameters under DistributedDataParallel, in the whole process: a user may have given us the module
    inside it, and a trainer may hide the wrapper. It looks at every object there is: call it once, when the
    wrapper must be there (after the first step)."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Replicas()
    holders: dict[int, Holders] = {}
    kept: list[torch.Tensor] = []
    wrappers: list[DistributedDataParallel] = []
    for wrapper in _wrappers(gc.get_objects()):
        try:
            ranks = tuple(sorted(torch.distributed.get_process_group_ranks(wrapper.process_group)))
        except KeyError:  # a wrapper of a process group that was destroyed
            continue
        if len(ranks) < 2:
            continue
        if not _averages(wrapper):
            name = class_of(wrapper.module).__qualname__
            log.info(
                "ranks may diverge under the communication hook of %s: each saves its own parameters", name
            )
            continue
        wrappers.append(wrapper)
        for parameter in wrapper._module_parameters:  # all but those that it must ignore
            if not is_dtensor(parameter):
                holders[id(parameter)] = ranks
                kept.append(parameter)
    return Replicas(holders, tuple(kept), tuple(wrappers))


def _wrappers(found: Iterable[object]) -> Iterator[DistributedDataParallel]:
    """By their exact type: a million objects take 50 ms, and ten times as long with isinstance(), which would
    also ask a lazy proxy for its __class__ and so import what is behind it."""
    kinds = {DistributedDataParallel}
    more = [DistributedDataParallel]
    while more:
        more = [kind for known in more for kind in known.__subclasses__()]
        kinds.update(more)
    for value in found:
        if (
            type(value) in kinds
            and isinstance(value, DistributedDataParallel)
            and hasattr(value, "_module_parameters")
        ):
            yield value


def _averages(wrapper: DistributedDataParallel) -> bool:
    """Whether all ranks apply the same gradient. Local SGD does not, and of a hook that is not torch's own,
    this is unknown."""
    for hook, state in getattr(wrapper, "_comm_hooks", ()):
        name, module = getattr(hook, "__name__", ""), getattr(hook, "__module__", "")
        if name in _APART or type(state).__name__ == "PostLocalSGDState" or not module.startswith(_HOOKS):
            return False
    return True


# ---- fully_shard -------------------------------------------------------------------------------------------
#
# Facts, torch 2.13. fully_shard() gives a module a class made for the purpose (FSDPLinear: FSDPModule, then
# Linear), and its parameters become DTensors: FSDPParam.sharded_param, the ones that the optimizer has. From
# forward to backward `module._parameters` holds other tensors, the gathered ones or a smaller sharding
# (reshard_after_forward=2), and those of the root stay there after an evaluation. The sharded ones keep their
# memory all the while, and nothing but the optimizer writes to it. So they are what is saved, whatever the
# module holds at the moment. FSDPParam is known to the hook that it hangs on its module's load_state_dict(),
# the only way to it from a module whose group belongs to a module above. That hook, and those that the group
# adds at the first forward, do nothing to tensors that are written in place.


def own_hook(hook: Any) -> bool:
    """Whether fully_shard() has installed a state_dict hook."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_FSDP)


def managed(modules: Iterable[torch.nn.Module]) -> dict[tuple[int, str], Any]:
    """The FSDPParam of each parameter that has one, by the id of its module and its name there."""
    found: dict[tuple[int, str], Any] = {}
    for module in modules:
        for hook in module._load_state_dict_post_hooks.values():
            if own_hook(hook):
                parameter = _behind(hook)
                if parameter is not None:
                    info = parameter._module_info
                    places = [
                        (info.module, info.param_name),
                        *zip(info.shared_modules, info.shared_param_names, strict=True),
                    ]
                    found.update({(id(owner), name): parameter for owner, name in places})
    return found


def _behind(hook: Any) -> Any:
    for cell in getattr(hook, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "sharded_param") and hasattr(cell.cell_contents, "_module_info"):
            return cell.cell_contents
    return None


def class_of(module: torch.nn.Module) -> type:
    """The class that a module had before fully_shard()."""
    kinds = type(module).__mro__
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1] if "FSDPModule" in names else kinds[0]


def pending(parameter: Any) -> bool:
    """Whether an FSDPParam holds a gradient that has not been reduced (set_requires_gradient_sync(False)): it
    is not in .grad."""
    gathered = getattr(parameter, "_unsharded_param", None)
    return getattr(parameter, "unsharded_accumulated_grad", None) is not None or (
        gathered is not None and gathered.grad is not None
    )
