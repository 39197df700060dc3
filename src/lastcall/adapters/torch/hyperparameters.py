"""What a script gives its optimizers: learning rate, weight decay. Edited before a restart, the checkpoint
overrules it: said once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

log = logging.getLogger("lastcall")
Given = dict[str, list[dict[str, Any]]]
_PLAIN = (bool, int, float, str)


def of(state: Mapping[str, object]) -> Given:
    """Of the optimizers among the values of protect(), by name and group."""
    return {
        name: [
            {key: told for key, value in group.items() if (told := _plain(value)) is not None}
            for group in value.param_groups
        ]
        for name, value in state.items()
        if isinstance(value, torch.optim.Optimizer)
    }


def compare(before: object, now: Given, state: Mapping[str, object]) -> None:
    """Say where the script gives something else than it did when the run began: what was saved counts."""
    if not isinstance(before, dict):
        return
    for name, groups in now.items():
        were = before.get(name)
        if not isinstance(were, list) or len(were) != len(groups):
            continue
        for at, (was, group) in enumerate(zip(were, groups, strict=True)):
            for key, value in group.items():
                if isinstance(was, dict) and key in was and was[key] != value:
                    log.warning(
                        "%s: %s was %s when the run began and is %s in the script now. The checkpoint's "
                        "value is used; to change it, "
                        "set it inside the block: %s.param_groups[%d][%r] = %s",
                        name,
                        key,
                        was[key],
                        value,
                        name,
                        at,
                        key,
                        value,
                    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple) and all(type(item) in _PLAIN for item in value):
        return list(value)
    return None
