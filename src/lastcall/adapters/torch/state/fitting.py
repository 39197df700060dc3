"""Whether a saved module or optimizer fits the live one, and how it gets there."""

from __future__ import annotations

from typing import Any

import torch

from lastcall import errors
from lastcall.adapters.torch.state.parts import Build, Restoration
from lastcall.adapters.torch.state.structure import Structure
from lastcall.adapters.torch.tensors import nodes, tensors

_REMEDY = "Build it as it was when it was saved, or start in another directory."


def match_module(
    module: torch.nn.Module, found: Structure, restorer: Restoration, document: dict[str, object], path: str
) -> None:
    """Parameters and buffers are read in place. load_state_dict() is called only where it would do more than
    copy."""
    saved = {name: nodes.ref(ref) for name, ref in nodes.pairs(document, "tensors")}
    live, extras = found.state()
    others = {
        name: restorer.fill(None, restorer.decode(value), f"{path}.state_dict()[{name!r}]")
        for name, value in nodes.pairs(document, "others")
    }
    plainly = found.plain and found.loads_plainly
    if plainly:
        _check_names(set(saved) | set(others), set(live) | set(extras), path)
    _check_ties(found, live, saved, path)
    read: dict[str, torch.Tensor] = {}
    for name, ref in saved.items():
        if name in live and plainly:
            _check_tensor(live[name], ref, f"{path}.{name}")
        read[name] = restorer.tensor(ref, live.get(name))
    if not plainly or others or not all(found.aliases(tensor) for tensor in live.values()):
        versions = nodes.pairs(document, "versions")
        restorer.later(0, path, lambda: _load(module, read, others, versions))


def _check_names(then: set[str], now: set[str], path: str) -> None:
    missing, unexpected = sorted(now - then), sorted(then - now)
    if missing or unexpected:
        parts = []
        if missing:
            parts.append(f"{len(missing)} that the checkpoint does not have ({_some(missing)})")
        if unexpected:
            parts.append(f"{len(unexpected)} only in the checkpoint ({_some(unexpected)})")
        raise errors.MismatchError(
            f"{path}: the names of its tensors differ: {' and '.join(parts)}. {_REMEDY}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _check_tensor(live: torch.Tensor, ref: nodes.Ref, path: str) -> None:
    if tuple(live.shape) != ref.shape:
        raise errors.MismatchError(
            f"{path}: its shape is {ref.shape} in the checkpoint and {tuple(live.shape)} now. {_REMEDY}"
        )
    if live.dtype != ref.dtype:
        raise errors.MismatchError(
            f"{path}: its dtype is {ref.dtype} in the checkpoint and {live.dtype} now, so it would not be "
            f"exact. {_REMEDY}"
        )
    dense = tuple(tensors.dense(live).shape)
    if dense != ref.dense:
        raise errors.MismatchError(
            f"{path}: {ref.dense} of its {ref.shape} numbers were in memory when it was saved, and {dense} "
            "are now "
            f"(expand()). {_REMEDY}"
        )


def _check_ties(
    found: Structure, live: dict[str, torch.Tensor], saved: dict[str, nodes.Ref], path: str
) -> None:
    """One live parameter cannot be read from two stored ones: which of them would be right?"""
    known: dict[int, tuple[str, nodes.Ref]] = {}
    for name, ref in saved.items():
        if found.is_parameter(name) and name in live:
            other, first = known.setdefault(id(live[name]), (name, ref))
            if first.place != ref.place:
                raise errors.MismatchError(
                    f"{path}.{name}: is the same parameter as {path}.{other} now, and was not when it was "
                    f"saved. {_REMEDY}"
                )


def _load(
    module: Any, read: dict[str, torch.Tensor], others: dict[str, Build], versions: list[tuple[Any, Any]]
) -> None:
    state = module.state_dict().__class__()
    state.update({name: tensor.detach() for name, tensor in read.items()})
    state.update({name: build() for name, build in others.items()})
    metadata = {name: {"version": 1} for name, _ in module.named_modules(remove_duplicate=False)}
    metadata.update({str(name): {"version": version} for name, version in versions})
    if type(state) is not dict:
        state._metadata = metadata
    module.load_state_dict(state)


def match_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    restorer: Restoration,
    document: dict[str, object],
    path: str,
) -> None:
    """State tensors are read in place where they exist already; load_state_dict() gets the whole."""
    restorer.same_class(optimizer, document, path)
    document = _with_added(optimizer, restorer, document, path)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if document.get("sizes") != sizes:
        raise errors.MismatchError(
            f"{path}: it has parameter groups of {sizes} now, and of {document.get('sizes')!r:.200} in the "
            f"checkpoint. {_REMEDY}"
        )
    kept = restorer.decode(document.get("groups"))
    if (
        not isinstance(kept, list)
        or len(kept) != len(sizes)
        or not all(isinstance(group, dict) for group in kept)
    ):
        raise errors.CheckpointError(
            f"{path}: the saved parameter groups are no list of {len(sizes)} dicts: damaged"
        )
    groups = restorer.fill(None, kept, f"{path}.param_groups")
    state: dict[int, dict[str, Build]] = {}
    for index, row in nodes.pairs(document, "state"):
        if type(index) is not int or not 0 <= index < len(parameters):
            raise errors.CheckpointError(
                f"{path}: the document holds state for parameter {index!r:.40}, which is none"
            )
        live: dict[str, Any] = optimizer.state.get(parameters[index], {})
        state[index] = {
            key: restorer.fill(
                live.get(key),
                restorer.decode(value),
                f"{path}.state[{index}][{key!r}]",
                True,
                parameters[index],
            )
            for key, value in nodes.pairs({"row": row}, "row")
        }
        _check_moments(state[index], parameters[index], path, index)
    restorer.later(0, path, lambda: _load_optimizer(optimizer, parameters, sizes, groups, state))


def _with_added(optimizer: Any, restorer: Restoration, document: dict[str, Any], path: str) -> dict[str, Any]:
    """The document for the groups that are there now, where the script had added others inside its loop. A
    resumed script may come to that again, on its way to the loop: until the loop begins they are left out,
    and then added if they are still missing."""
    sizes, groups = document.get("sizes"), document.get("groups")
    live = [len(group["params"]) for group in optimizer.param_groups]
    if (
        not isinstance(sizes, list)
        or not isinstance(groups, list)
        or not len(live) < len(sizes)
        or live != sizes[: len(live)]
    ):
        return document
    missing = _named(document.get("added"), len(sizes) - len(live), restorer.parameters())
    if missing is None:
        return document  # refused, as a model of another form is
    if restorer.patient:
        restorer.owed.add(path)
        rows = [
            [index, row]
            for index, row in nodes.pairs(document, "state")
            if type(index) is int and index < sum(live)
        ]
        return {**document, "sizes": live, "groups": groups[: len(live)], "state": rows}
    if restorer.again:
        for parameters in missing:
            optimizer.add_param_group({"params": parameters})
    return document


def _named(added: object, count: int, known: dict[str, torch.Tensor]) -> list[list[torch.Tensor]] | None:
    """The last groups of those that were added, by the names of their parameters; None if one of them is not
    there."""
    if (
        not isinstance(added, list)
        or len(added) < count
        or not all(isinstance(names, list) for names in added)
    ):
        return None
    found = [
        [known.get(name) if isinstance(name, str) else None for name in names] for names in added[-count:]
    ]
    complete = [[parameter for parameter in group if parameter is not None] for group in found]
    return complete if [*map(len, complete)] == [*map(len, found)] else None


def _check_moments(row: dict[str, Build], parameter: torch.Tensor, path: str, index: int) -> None:
    """Moments have the shape of their parameter. Reordered parameters would otherwise be found only by a
    worse loss."""
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        value = row[key]() if key in row else None
        if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
            raise errors.MismatchError(
                f"{path}: its {key} for parameter {index} has shape {tuple(value.shape)} in the checkpoint, "
                "and the "
                f"parameter {tuple(parameter.shape)} now: were the parameters given in another order? "
                f"{_REMEDY}"
            )


def _load_optimizer(
    optimizer: Any, parameters: list[torch.Tensor], sizes: list[int], groups: Build, state: Any
) -> None:
    built: list[dict[str, Any]] = groups()
    start = 0
    for group, size in zip(built, sizes, strict=True):
        group["params"] = list(range(start, start + size))
        start += size
    saved = {index: {key: build() for key, build in row.items()} for index, row in state.items()}
    live = optimizer.param_groups
    optimizer.load_state_dict(
        {"state": {index: dict(row) for index, row in saved.items()}, "param_groups": built}
    )
    _keep(live, optimizer)
    for index, row in saved.items():
        _undo_casts(optimizer.state[parameters[index]], row)


def _keep(live: list[dict[str, Any]], optimizer: Any) -> None:
    """load_state_dict() makes new groups. The script may hold the old ones (`group =
    optimizer.param_groups[0]`), and so may an optimizer inside this one: they stay, with the new contents."""
    for group, loaded in zip(live, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    optimizer.param_groups = live


def _undo_casts(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    """load_state_dict() casts moments to the dtype of their parameter: fp32 moments of a bf16 model would
    lose bits."""
    for key, value in saved.items():
        now = loaded.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            loaded[key] = value.to(now.device)
