"""The objects below a loader: what its sampler, its dataset and its functions hold, each with the path that a
user would write.

Attributes, containers, partials, closures, bound methods, the attributes of the user's own classes and the
globals that the user's own functions name. Bounded in depth and number; never into a model, an optimizer,
another loader, or the insides of a library.
"""

from __future__ import annotations

import ast
import collections
import dis
import functools
import re
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lastcall.adapters.torch.data.objects import leaves

Path = tuple[str, ...]
_MOST = 600  # values looked at
_DEPTH = 7
_WIDE = 64  # entries of a container that are looked at one by one
_NEVER = (  # libraries that keep no place in the data of a training loop, only caches and handles
    "torch.optim",
    "torch.utils.data.dataloader",
    "torch.distributed",
    "torch.cuda",
    "torch._",
    "lastcall",
    "numpy",
    "pandas",
    "pyarrow",
    "polars",
    "scipy",
    "PIL",
    "cv2",
    "h5py",
    "lmdb",
    "datasets.",
    "tokenizers",
    "transformers.models",
    "transformers.tokenization",
    "fsspec",
)
_STANDARD = sys.stdlib_module_names - {"builtins", "functools", "collections"}
# Numbers that mean something to this process alone.
_OF_THE_PROCESS = re.compile(
    r"(^|_)(fd|pid|ppid|tid|fileno|port|handle|socket|lock|thread|conn|time|timestamp)s?$", re.I
)
_MADE_BY_THE_STATE = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__"}
)


class Leaf(NamedTuple):
    value: Any
    owner: Any  # what it is an attribute or an entry of
    token: str  # which one


def roots(loader: Any) -> dict[str, Any]:
    names = ("dataset", "sampler", "batch_sampler", "collate_fn")
    return {name: found for name in names if (found := getattr(loader, name, None)) is not None}


def name_of(path: Path) -> str:
    """As a user would write it: `dataset.transform.count`, `Sampler.epoch` of a class, `rng` of a module or
    an enclosing function."""
    told = ""
    for token in path:
        if token.startswith("<"):
            told = token.strip("<()>")
        elif token.startswith(".__class__("):
            told = token[len(".__class__(") : -1]
        else:
            told += token
    return told


def walk(
    tops: dict[str, Any], without: frozenset[int] = frozenset(), asked: bool = False
) -> tuple[dict[Path, Leaf], dict[Path, Any]]:
    """All values, and all objects that hold them, by path. `without`: the ids of generators that are left
    out; `asked`: so are objects with a state_dict()."""
    found: dict[Path, Leaf] = {}
    holders: dict[Path, Any] = {}
    seen: set[int] = set()
    waiting: collections.deque[tuple[Path, Any, Any, int]] = collections.deque(
        ((name,), value, None, 0) for name, value in tops.items()
    )
    while waiting and len(found) + len(holders) < _MOST:
        path, value, owner, depth = waiting.popleft()
        if leaves.is_leaf(value):
            if owner is not None and id(value) not in without:
                found[path] = Leaf(value, owner, path[-1])
            continue
        if id(value) in seen or depth > _DEPTH or _skipped(value):
            continue
        if asked and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple | dict | set | frozenset | collections.deque) and _as_one(value):
            if owner is not None:
                found[path] = Leaf(value, owner, path[-1])
            continue
        holders[path] = value
        waiting.extend(((*path, token), item, value, depth + 1) for token, item in _inside(value))
    return found, holders


def has_child(owner: Any, token: str) -> bool:
    if token.startswith("."):
        return token[1:] in getattr(owner, "__dict__", {})
    if isinstance(owner, dict | list | tuple):
        key = ast.literal_eval(token[1:-1])
        return key in owner if isinstance(owner, dict) else key < len(owner)
    return True


def child(owner: Any, token: str) -> Any:
    """What is there now; LookupError, AttributeError, ValueError where nothing is."""
    if token.startswith("."):
        return vars(owner)[token[1:]]
    if token.startswith("<"):
        return _cell(owner, token).cell_contents if token[1] == "(" else owner.__globals__[token[1:-1]]
    return owner[ast.literal_eval(token[1:-1])]


def set_child(owner: Any, token: str, value: Any) -> None:
    if token.startswith("."):
        if isinstance(owner, type):
            setattr(owner, token[1:], value)
        else:
            vars(owner)[token[1:]] = value
    elif token.startswith("<"):
        if token[1] == "(":
            _cell(owner, token).cell_contents = value
        else:
            owner.__globals__[token[1:-1]] = value
    elif isinstance(owner, dict | list):
        key = ast.literal_eval(token[1:-1])
        if isinstance(owner, list) and key == len(owner):
            owner.append(value)
        elif isinstance(owner, dict) or key < len(owner):
            owner[key] = value


def drop_child(owner: Any, token: str) -> None:
    if token.startswith(".") and not isinstance(owner, type):
        vars(owner).pop(token[1:], None)
    elif isinstance(owner, dict):
        owner.pop(ast.literal_eval(token[1:-1]), None)


def _cell(owner: Any, token: str) -> Any:
    return owner.__closure__[owner.__code__.co_freevars.index(token[2:-2])]


def opaque(value: Any) -> bool:
    """Whether it is of a library that is never looked into."""
    return str(type(value).__module__).startswith(_NEVER)


def _skipped(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):  # transforms are written as modules, too
        return next(value.parameters(), None) is not None
    if isinstance(value, type):
        return not own(value.__module__)
    kind: Any = type(value)
    return _skipped_kind(kind)


@functools.lru_cache(1024)
def _skipped_kind(kind: Any) -> bool:
    module = kind.__module__ or ""
    return (
        module.startswith(_NEVER)
        or issubclass(kind, types.ModuleType)
        or module.partition(".")[0] in _STANDARD
    )


def _as_one(value: Any) -> bool:
    """A container that is saved whole, or that is too large to be looked into."""
    if len(value) > _WIDE or isinstance(value, set | frozenset | collections.deque):
        return True
    items = value.values() if isinstance(value, dict) else value
    return all(_plain(item, 0) for item in items)


def _plain(item: Any, depth: int) -> bool:
    if leaves.is_generator(item):
        return False
    if leaves.is_leaf(item):
        return True
    if depth < 3 and type(item) in (list, tuple, dict, set) and len(item) <= 4 * _WIDE:
        return all(_plain(inner, depth + 1) for inner in (item.values() if type(item) is dict else item))
    return False


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items()) if type(key) in (str, int))
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield (".__self__", value.__self__)
        yield from _named_by(value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _named_by(value)
    elif isinstance(value, type):
        yield from _of_class(value)
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from (
                (f".{name}", item) for name, item in list(attributes.items()) if _followed(name, item)
            )
        kind: Any = type(value)
        yield from _own_classes(kind)


@functools.lru_cache(512)
def _own_classes(kind: Any) -> tuple[tuple[str, type], ...]:
    return tuple((f".__class__({one.__name__})", one) for one in kind.__mro__ if own(one.__module__))


def _followed(name: str, item: Any) -> bool:
    return not name.startswith("_lc_") and not (type(item) in (int, float) and _OF_THE_PROCESS.search(name))


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Attributes of a user's own class, and the globals that its methods name."""
    for name, item in list(vars(kind).items()):
        if name in _MADE_BY_THE_STATE or (name.startswith("__") and not isinstance(item, types.FunctionType)):
            continue
        function = item.__func__ if isinstance(item, staticmethod | classmethod) else item
        if isinstance(function, types.FunctionType):
            if name != "__init__" and (function.__closure__ or _own_globals(function)):
                yield (f".{name}", function)
        elif not isinstance(item, property) and _followed(name, item):
            yield (f".{name}", item)


def _named_by(function: Any) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield (f"<({name})>", cell.cell_contents)
        except ValueError:  # empty still
            continue
    for name in _own_globals(function):
        item = function.__globals__[name]
        if _followed(name, item):
            yield (f"<{name}>", item)


def _own_globals(function: Any) -> list[str]:
    if not own(function.__module__):
        return []
    there = function.__globals__
    names = _global_names(function.__code__)
    return [
        name
        for name in names
        if name in there and not isinstance(there[name], types.FunctionType | types.ModuleType | type)
    ]


@functools.lru_cache(512)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function reads or writes, and those inside it."""
    named = [
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")
    ]
    inner = [
        name for const in code.co_consts if isinstance(const, types.CodeType) for name in _global_names(const)
    ]
    return tuple(dict.fromkeys([*named, *inner]))


@functools.lru_cache(512)
def own(module: str | None) -> bool:
    """Whether a module is the user's own, and no library."""
    top = (module or "").partition(".")[0]
    if top in ("", "builtins", "torch", "numpy", "torchdata", "lastcall"):
        return False
    if top in ("__main__", "__mp_main__"):
        return True
    if top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
