"""What an Accelerator has prepared, as values for the protected state."""

from __future__ import annotations

import logging
from typing import Any

from lastcall import errors
from lastcall.adapters.torch.state import copies, objects, parts
from lastcall.adapters.torch.state.entries import StateSet

log = logging.getLogger("lastcall")
HELD = "accelerator"  # what save_state() writes: not kept in the document
LEDGER, DATA = "accelerator_steps", "accelerator_data"  # what it does not, or not exactly
SPREAD = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")  # only all ranks together can save these


class AccumulationStep:
    """The Accelerator's own counter: which micro-batch of an accumulation window comes next."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": int(self._accelerator.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = int(state["step"])


class Frozen:
    """Stands for an object in a save: its state as it was at the boundary."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def values(accelerator: Any) -> dict[str, object]:
    """The objects, by what they are. Those that cannot be copied at a boundary are left out: a rescue reads
    them as they are."""
    found = {
        "models": [
            accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models
        ],
        "optimizers": [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers],
        "schedulers": [
            _copied(getattr(one, "scheduler", one), "scheduler") for one in accelerator._schedulers
        ],
        "scalers": [_copied(accelerator.scaler, "scaler")],
        "objects": [_copied(one, "registered object") for one in accelerator._custom_objects],
    }
    return {HELD: found, LEDGER: AccumulationStep(accelerator), DATA: list(accelerator._dataloaders)}


def _copied(value: Any, what: str) -> Any:
    if value is None:
        return None
    try:
        StateSet({"value": value})
    except errors.StateError as error:
        log.warning("A rescue cannot copy all of a %s's state (%s): it reads it as it is", what, error)
        return None
    return value


def count(accelerator: Any) -> tuple[int, ...]:
    """How many of everything there are: what is prepared later would not be saved."""
    return tuple(
        len(getattr(accelerator, name))
        for name in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
    )


def knows(accelerator: Any, value: object) -> bool:
    """Whether it is one of the objects, with or without Accelerate's wrapper."""
    lists = ("_models", "_optimizers", "_schedulers", "_custom_objects")
    known = [one for name in lists for one in getattr(accelerator, name)]
    inner = [
        getattr(one, name, None)
        for one in known
        for name in ("module", "_orig_mod", "optimizer", "scheduler")
    ]
    return value is not None and any(one is value for one in (*known, *inner))


def spread(accelerator: Any) -> bool:
    """Whether the state is spread over the ranks in a way that only Accelerate knows how to save."""
    return str(getattr(accelerator.distributed_type, "value", "")) in SPREAD


def frozen(small: Any, name: str, live: list[Any]) -> list[Any]:
    """The objects of a list, each replaced by its state at the boundary where there is a copy of it."""
    held = small[HELD][name]
    return [
        Frozen(_thawed(one.part.thawed(one.copied)))
        if isinstance(one, parts.Held) and isinstance(one.part, objects.ObjectPart)
        else original
        for one, original in zip(held, live, strict=True)
    ]


def _thawed(value: Any) -> Any:
    """A state_dict as it was when the copy was taken."""
    if isinstance(value, copies.Copied):
        return value.copy
    if isinstance(value, parts.Held):
        return (
            _thawed(value.part.thawed(value.copied))
            if isinstance(value.part, objects.ObjectPart)
            else value.part.value
        )
    if isinstance(value, dict):
        copied = [(key, _thawed(item)) for key, item in value.items()]
        return type(value)(copied) if type(value) is not dict else dict(copied)
    if type(value) in (list, tuple):
        return type(value)(_thawed(item) for item in value)
    return value
