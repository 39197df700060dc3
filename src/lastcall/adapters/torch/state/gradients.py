"""Gradients that wait for their optimizer (accumulation): a group of their own, found again by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lastcall import errors, types
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.state import modules, optimizers, parts
from lastcall.adapters.torch.state.restore import Restorer
from lastcall.adapters.torch.tensors import dtypes, tensors
from lastcall.adapters.torch.tensors.table import place_of, stored_share

GROUP = "grads"

Seen = Iterable[tuple[parts.Part, str]]


def named(seen: Seen) -> dict[str, torch.Tensor]:
    """Parameters by name: those of modules by theirs, those that only an optimizer knows by their index in
    it."""
    found: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for part, path in sorted(seen, key=lambda entry: entry[0].rank):
        group, rest = place_of(path, whole="")
        prefix = f"{group}.{rest}" if rest else group
        if isinstance(part, modules.ModulePart):
            each: Iterable[tuple[str, torch.Tensor]] = part.refresh().parameters().items()
        elif isinstance(part, optimizers.OptimizerPart):
            each = [(str(index), parameter) for index, parameter in enumerate(part.parameters())]
        else:
            continue
        for name, parameter in each:
            if id(parameter) not in known:
                known.add(id(parameter))
                found[f"{prefix}.{name}"] = parameter
    return found


def group(seen: Seen) -> types.Group | None:
    """The gradients there are, read live, or None when there are none. Under DistributedDataParallel each
    rank has its own: they are not the same before they have been reduced."""
    entries = []
    for name, parameter in named(seen).items():
        grad = parameter.grad
        if grad is not None and not _partial(grad):
            tensors.check(grad, f"{name}.grad")
            mine = placement.local(grad).detach()
            code, shape = dtypes.stored_as(mine.dtype, tuple(mine.shape))
            share = stored_share(grad, shape) if placement.is_dtensor(grad) else None
            entries.append(types.TensorEntry(name, code, shape, tensors.source(mine), share))
    return types.Group(GROUP, tuple(entries)) if entries else None


def missing(seen: Seen) -> bool:
    """Whether there are gradients that group() does not have: those that fully_shard() keeps to itself until
    it reduces them, and DTensors that still have to be added up over the ranks."""
    seen = tuple(seen)
    if any(_partial(parameter.grad) for parameter in named(seen).values()):
        return True
    return any(
        placement.pending(owner)
        for part, _ in seen
        if isinstance(part, modules.ModulePart)
        for owner in part.structure.managed.values()
    )


def _partial(grad: torch.Tensor | None) -> bool:
    return placement.is_dtensor(grad) and any(way.is_partial() for way in grad.placements)


def match(seen: Seen, stored: Mapping[str, object], restorer: Restorer) -> None:
    """Name targets for the saved gradients; finish() hangs them on their parameters and takes all others
    away."""
    live = named(seen)
    unknown = sorted(set(stored) - set(live))
    if unknown:
        raise errors.MismatchError(
            f"the checkpoint holds gradients of {len(unknown)} parameters that are not there now "
            f"({', '.join(unknown[:5])}). Build the model as it was when it was saved."
        )
    grads = {name: restorer.gradient((GROUP, name), live[name]) for name in stored}

    def hang() -> None:
        for name, parameter in live.items():
            parameter.grad = grads.get(name)

    restorer.later(1, "gradients", hang)
