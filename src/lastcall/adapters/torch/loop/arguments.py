"""What is wrong with the arguments of protect(), run.steps() and run.epochs(), said before anything is
done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lastcall import settings
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig


def refuse_settings(config: object, periodic: object, state: Mapping[str, object]) -> None:
    """A setting among the state would be saved, and do nothing. What is no plain value may have the name of
    one: `mode=model`."""
    for given, kind, name in (
        (config, JITCheckpointConfig, "config"),
        (periodic, PeriodicCheckpointConfig, "periodic"),
    ):
        if given is not None and not isinstance(given, kind):
            settings.fail(
                f"protect({name}={given!r:.100}): it must be a {kind.__name__}, as in "
                f"{name}=lastcall.{kind.__name__}(...)"
            )
    for name, value in state.items():
        spelling = settings.misplaced(name, value)
        if spelling is not None and (
            value is None or isinstance(value, bool | int | float | str | list | tuple)
        ):
            settings.fail(
                f"protect({name}={value!r:.100}): a setting is not state. Write protect(..., {spelling}). "
                "If it is a value of your own that shall be saved, give it another name."
            )


def length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterable dataset does not say
        return None


def check_total(total: object, what: str) -> None:
    if type(total) is not int or total < 0:
        raise ValueError(f"run.{what}({total!r}): give the number of {what} as a whole number of at least 0")


def with_inner(state: dict[str, Any]) -> dict[str, Any]:
    """The state, with the optimizers that step inside those of it (SAM's `base_optimizer`), under names of
    their own: torch's own state_dict() of the outer one does not hold theirs."""
    known = {id(value) for value in state.values()}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if (
            isinstance(value, torch.optim.Optimizer)
            and type(value).state_dict is torch.optim.Optimizer.state_dict
        ):
            for attribute, inner in vars(value).items():
                if isinstance(inner, torch.optim.Optimizer) and id(inner) not in known:
                    known.add(id(inner))
                    found[f"{name}_{attribute.strip('_')}"] = inner
    return {**state, **{name: inner for name, inner in found.items() if name not in state}}
