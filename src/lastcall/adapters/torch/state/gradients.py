"""Gradients that wait for their optimizer (accumulation): a group of their own, found again by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lastcall import errors, types
from lastcall.adapters.torch.state import dtypes, modules, optimizers, parts, tensors
from lastcall.adapters.torch.state.restore import Restorer
from lastcall.adapters.torch.state.shelf import place_of

GROUP = "grads"

Seen = Iterable[tuple[parts.Part, str]]


def named(seen: Seen) -> dict[str, torch.Tensor]:
    """Parameters by name: those of modules by theirs, those that only an optimizer knows by their index in it."""
    found: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for part, path in sorted(seen, key=lambda entry: entry[0].rank):
        group, rest = place_of(path, whole="")
        prefix = f"{group}.{rest}" if rest else group
        if isinstance(part, modules.ModulePart):
            each: Iterable[tuple[str, torch.Tensor]] = part.module.named_parameters()
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
    """The gradients there are, read live, or None when there are none."""
    entries = []
    for name, parameter in named(seen).items():
        grad = parameter.grad
        if grad is not None:
            tensors.check(grad, f"{name}.grad")
            code, shape = dtypes.stored_as(grad.dtype, tuple(grad.shape))
            entries.append(types.TensorEntry(name, code, shape, tensors.source(grad.detach())))
    return types.Group(GROUP, tuple(entries)) if entries else None


def match(seen: Seen, stored: Mapping[str, object], restorer: Restorer) -> None:
    """Name targets for the saved gradients; finish() hangs them on their parameters and takes all others away."""
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
