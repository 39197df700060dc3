"""What a subclass of Trainer counts in attributes of its own: tokens seen, metrics that wait to be averaged.
No checkpoint of Hugging Face's holds them, and a log line after a resume would be of the steps since then
only."""

from __future__ import annotations

import collections
import dis
import inspect
from typing import Any

from transformers import Trainer

_MOST = 2000  # items of a container, nested ones included: what is larger is data, and not a count
_SCALARS = (bool, int, float, str, type(None))


class Attributes:
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        functions = [member for member in vars(Trainer).values() if inspect.isfunction(member)]
        stored = (
            step
            for function in functions
            for step in dis.get_instructions(function)
            if step.opname == "STORE_ATTR"
        )
        self._of_others = {str(step.argval) for step in stored} | set(vars(Trainer))

    def copy(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in list(vars(self._trainer).items()):
            if name in self._of_others or name.startswith("_lastcall"):
                continue
            try:
                found[name] = _copied(value, [_MOST])
            except (_NotPlain, RuntimeError):  # RuntimeError: it changes while a side thread looks at it
                continue
        return found

    def restore(self, saved: dict[str, Any]) -> None:
        """Containers keep their identity and kind: somebody may hold them."""
        for name, value in saved.items():
            if name in vars(self._trainer):
                setattr(self._trainer, name, _filled(vars(self._trainer)[name], value))


class _NotPlain(Exception):
    pass


def _copied(value: Any, room: list[int]) -> Any:
    kind = type(value)
    room[0] -= 1
    if room[0] < 0:
        raise _NotPlain
    if kind in _SCALARS:
        return value
    if kind in (dict, collections.defaultdict, collections.OrderedDict) and all(
        type(key) in _SCALARS for key in value
    ):
        return {key: _copied(item, room) for key, item in value.items()}
    if kind in (list, tuple, collections.deque):
        items = [_copied(item, room) for item in value]
        return tuple(items) if kind is tuple else items
    raise _NotPlain


def _filled(live: Any, saved: Any) -> Any:
    if isinstance(live, dict) and isinstance(saved, dict):
        filled = {key: _filled(live[key], item) if key in live else item for key, item in saved.items()}
        live.clear()
        live.update(filled)
        return live
    if isinstance(live, list | collections.deque) and isinstance(saved, list):
        live.clear()
        live.extend(saved)
        return live
    return saved if type(live) is type(saved) or type(saved) in _SCALARS else live
