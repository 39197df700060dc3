"""Values whose class must come back with them: members of enumerations, named tuples, decimals and fractions,
and objects of the script's own classes that the loop makes.

They are saved as the name of the class and what is in them, and made again from the class that the resumed
script has under that name. Nothing is imported for it, and no code of such an object runs: its attributes are
set. A class that cannot be found by its name (one that is made inside a function) cannot be saved.
"""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import sys
from collections.abc import Callable
from typing import Any

from lastcall.adapters.torch.carry import frames

_TAG = "lastcall.class"
_NUMBERS = (decimal.Decimal, fractions.Fraction)  # made from their text


def is_one(value: object) -> bool:
    return isinstance(value, enum.Enum) or is_named(value) or type(value) in _NUMBERS


def is_named(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def state(value: Any, inside: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """As it is saved: hashable, if it is. None where its class cannot be found again."""
    kind = type(value)
    name = kind.__module__, kind.__qualname__
    if _find(*name) is not kind:
        return None
    if kind in _NUMBERS:
        return (_TAG, *name, str(value))
    if not isinstance(value, enum.Enum):
        return (_TAG, *name, tuple(map(inside, value)))
    return (
        (_TAG, *name, value.name)
        if value.name in kind.__members__
        else (_TAG, *name, None, inside(value.value))
    )


def is_plain(kind: type) -> bool:
    """Whether an object of this class is its attributes and nothing else, and can be made from them. One with
    a `__del__` would run it on whatever attributes a forged checkpoint has given it."""
    new: object = kind.__new__
    return (
        new is object.__new__
        and not hasattr(kind, "__del__")
        and _find(kind.__module__, kind.__qualname__) is kind
    )


def object_state(kind: type, attributes: dict[str, Any]) -> tuple[Any, ...]:
    return (_TAG, kind.__module__, kind.__qualname__, attributes)


def made(saved: Any, *, anew: bool = False) -> Any:
    """What was saved, with everything in it that has a class made again; the same object where nothing has,
    unless it is to be made `anew`, for an object of its own. Raises LookupError."""
    kind = type(saved)
    if kind is tuple and len(saved) > 3 and type(saved[0]) is str and saved[0] == _TAG:
        return _made(*saved[1:])
    if kind in (list, tuple, set, frozenset, collections.deque):
        items = [made(item, anew=anew) for item in saved]
        if not anew and all(one is other for one, other in zip(items, saved, strict=True)):
            return saved
        return collections.deque(items, saved.maxlen) if kind is collections.deque else kind(items)
    if isinstance(saved, dict):
        pairs = [(made(key), made(item, anew=anew)) for key, item in saved.items()]
        if not anew and all(
            key is old and item is saved[old] for (key, item), old in zip(pairs, saved, strict=True)
        ):
            return saved
        into = saved.copy()
        into.clear()
        for key, item in pairs:  # and not update(): a Counter's would count them
            into[key] = item
        return into
    return saved


def _made(module: str, name: str, *parts: Any) -> Any:
    kind, inside = _find(module, name), parts[0]
    if isinstance(kind, enum.EnumMeta):
        return kind(made(parts[1])) if inside is None else kind[inside]
    if kind in _NUMBERS:
        return kind(inside)
    if (
        kind is not None
        and type(inside) is dict
        and is_plain(kind)
        and not any(str(each).startswith("__") for each in inside)
    ):
        one = object.__new__(kind)
        for attribute, value in inside.items():
            object.__setattr__(one, attribute, made(value, anew=True))
        return one
    if kind is not None and type(inside) is tuple and len(inside) == len(getattr(kind, "_fields", ())):
        return tuple.__new__(kind, map(made, inside))
    raise LookupError(f"`{name}` of {module} as it was")


def _find(module: str, name: str) -> Any:
    """The class of this name in a module that is imported: a kind of value, or one of the script's own."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type(sys) | type) else None
    if not isinstance(found, type):
        return None
    named = issubclass(found, tuple) and hasattr(found, "_fields")
    return (
        found if found in _NUMBERS or named or issubclass(found, enum.Enum) or frames.is_own(module) else None
    )
