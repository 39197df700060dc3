"""Where a script keeps what it changes: variables of frames, attributes of its objects, classes and
functions, globals of its modules.

An owner has a name that is the same in every incarnation (`main: self.meters['loss']`), so that what was
saved of it finds it again.
"""

from __future__ import annotations

import ast
import contextvars
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lastcall.adapters.torch.carry import classes, clocks, frames, guards, movers, values
from lastcall.script.source import sources

_DEPTH = 4
_MANY = 2000  # owners
_LISTED = 256  # items of a container that are looked at
_TORCH = frozenset(vars(torch.nn.Module()))
# with what a scheduler notes there
_OPTIMIZER = frozenset(vars(torch.optim.Optimizer([torch.zeros(1)], {}))) | {"step", "_opt_called"}
_PASSED_OVER = (
    *(torch.Tensor, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Generator),
    *(torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.utils.data.Sampler, BaseException),
)
# what is below them is looked at
_LEADING_ON = (
    *(torch.nn.Module, torch.optim.Optimizer, contextvars.ContextVar),
    *(types.FunctionType, types.MethodType, functools.partial),
)
_NAMESPACES = frozenset(
    {("types", "SimpleNamespace"), ("argparse", "Namespace")}
    | {("collections", name) for name in ("UserDict", "UserList", "ChainMap")}
)


class Owner:
    """One place with named values."""

    open = True  # objects that come into it later are looked at, too

    def __init__(self, key: str, value: Any) -> None:
        self.key = key
        self.value = value

    def read(self) -> Mapping[str, Any]:
        """Names and values now."""
        raise NotImplementedError

    def some(self, names: Iterable[str]) -> Mapping[str, Any]:
        """As read(), of these names only."""
        own = self.read()
        return {name: own[name] for name in names if name in own}

    def write(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def shown(self, name: str) -> str:
        """What a user calls it."""
        return f"{self.key.rpartition(': ')[2]}.{name}"

    def is_time(self, name: str, value: object) -> bool:
        return False

    def is_guard(self, name: str, is_lost: Callable[[str], bool]) -> bool:
        """Whether it says that something is open that is not saved."""
        return False


class Attributes(Owner):
    """Of an object, or of a class."""

    def __init__(self, key: str, value: Any) -> None:
        super().__init__(key, value)
        kind = value if isinstance(value, type) else type(value)
        self._slots = values.slots(kind) if not isinstance(value, type) else []
        self._module = isinstance(value, torch.nn.Module)  # what it keeps in plain values is Inside's
        self._tree = _tree(kind)

    def read(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(self.value, "__dict__", {})
        if self._slots:
            found = {
                **found,
                **{name: getattr(self.value, name) for name in self._slots if hasattr(self.value, name)},
            }
        if isinstance(self.value, type):
            return {name: each for name, each in found.items() if not name.startswith("__")}
        if self._module:
            return {
                name: each
                for name, each in found.items()
                if name not in _TORCH and type(each) not in values.PLAIN
            }
        return found

    def write(self, name: str, value: Any) -> None:
        if self._module and ("." in name or name in self.value._buffers or type(value) in values.PLAIN):
            return  # Inside has the same key, and puts it back: in __dict__ it would hide a buffer
        if isinstance(self.value, type):
            setattr(self.value, name, value)
        elif name in getattr(self.value, "__dict__", {}) or name not in self._slots:
            try:
                # and no __setattr__ of the script's: frozen dataclasses, side effects
                self.value.__dict__[name] = value
            except AttributeError:
                setattr(self.value, name, value)
        else:
            object.__setattr__(self.value, name, value)

    def is_time(self, name: str, value: object) -> bool:
        return self._tree is not None and clocks.is_time(name, value, self._tree)

    def is_guard(self, name: str, is_lost: Callable[[str], bool]) -> bool:
        return self._tree is not None and guards.is_guard(name, self._tree, is_lost)


class Inside(Owner):
    """What a module and those below it keep beside their state_dict(): plain attributes (`training`, a
    dropout's `p`), which parameters are frozen, buffers that are not part of it."""

    open = False

    def __init__(self, key: str, value: torch.nn.Module) -> None:
        super().__init__(key, value)
        self._modules = {f"{path}." if path else "": module for path, module in value.named_modules()}

    def read(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for path, module in self._modules.items():
            # DDP notes there what it has set up in this process
            private = not type(module).__module__.startswith("torch.")
            for name, each in vars(module).items():
                if (
                    type(each) in values.PLAIN
                    and (name == "training" or name not in _TORCH)
                    and (private or not name.startswith("_"))
                ):
                    found[path + name] = each
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found[f"{path}{name}.requires_grad"] = parameter.requires_grad
            for name in module._non_persistent_buffers_set:
                found[path + name] = module._buffers.get(name)
        return found

    def some(self, names: Iterable[str]) -> Mapping[str, Any]:
        return {name: found for name in names for found in self._get(name)}

    def _get(self, name: str) -> Iterator[Any]:
        module, path, attribute = self._place(name)
        if module is not None and (attribute in vars(module) or attribute in module._buffers):
            yield getattr(module, attribute)
        elif attribute == "requires_grad":
            module, _, parameter = self._place(path.rstrip("."))
            if module is not None and module._parameters.get(parameter) is not None:
                yield getattr(module, parameter).requires_grad

    def write(self, name: str, value: Any) -> None:
        module, path, attribute = self._place(name)
        if module is None:  # of a parameter
            module, _, parameter = self._place(path.rstrip("."))
            if (
                module is not None
                and isinstance(live := getattr(module, parameter, None), torch.Tensor)
                and live.is_leaf
            ):
                live.requires_grad_(bool(value))
        elif attribute not in module._buffers:
            vars(module)[attribute] = value
        elif not values.put(module._buffers[attribute], value):
            module._buffers[attribute] = value

    def _place(self, name: str) -> tuple[torch.nn.Module | None, str, str]:
        path, dot, attribute = name.rpartition(".")
        return self._modules.get(path + dot), path + dot, attribute


class Globals(Owner):
    """Of a module; only what functions assign there."""

    def __init__(self, key: str, space: dict[str, Any], names: frozenset[str], tree: ast.AST) -> None:
        super().__init__(key, space)
        self._names = names
        self._tree = tree

    def read(self) -> Mapping[str, Any]:
        return {name: self.value[name] for name in self._names if name in self.value}

    def write(self, name: str, value: Any) -> None:
        self.value[name] = value

    def shown(self, name: str) -> str:
        return name

    def is_time(self, name: str, value: object) -> bool:
        return clocks.is_time(name, value, self._tree)

    def is_guard(self, name: str, is_lost: Callable[[str], bool]) -> bool:
        return guards.is_guard(name, self._tree, is_lost)


class Cells(Owner):
    """What a function has closed over, and its own attributes."""

    def __init__(self, key: str, value: types.FunctionType) -> None:
        super().__init__(key, value)
        self._cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))

    def read(self) -> Mapping[str, Any]:
        found = {**_defaults(self.value), **vars(self.value)}
        for name, cell in self._cells.items():
            try:
                found.setdefault(name, cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        return found

    def write(self, name: str, value: Any) -> None:
        if name in self._cells and name not in vars(self.value):
            self._cells[name].cell_contents = value
        else:
            setattr(self.value, name, value)


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """Containers that a function keeps from call to call: `def smooth(value, history=[])`."""
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    found = {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}
    return {f"({name})": value for name, value in found.items() if type(value) in values.MUTABLE}


class Items(Owner):
    """A container or a tensor that is changed in place: one value without a name of its own."""

    open = False

    def read(self) -> Mapping[str, Any]:
        return {"": self.value}

    def write(self, name: str, value: Any) -> None:
        values.put(self.value, value)

    def shown(self, name: str) -> str:
        return self.key.rpartition(": ")[2]


class Beside(Attributes):
    """What an optimizer of the script's own class keeps beside its state_dict(): a count of its steps."""

    def read(self) -> Mapping[str, Any]:
        return {name: each for name, each in super().read().items() if name not in _OPTIMIZER}


class Context(Owner):
    """The value of a context variable in the context that trains."""

    open = False

    def read(self) -> Mapping[str, Any]:
        return {"": self.value.get(None)}

    def write(self, name: str, value: Any) -> None:
        self.value.set(value)

    def shown(self, name: str) -> str:
        return self.key.rpartition(": ")[2]


class Walk:
    """Finds the owners below named values, each object once."""

    def __init__(self, handed: Callable[[object], bool]) -> None:
        self._handed = handed
        self._seen: set[int] = set()
        self.found: list[Owner] = []

    def below(self, key: str, value: Any, depth: int = 0) -> None:
        kind = type(value)
        if kind in values.PLAIN or depth > _DEPTH or len(self.found) >= _MANY or id(value) in self._seen:
            return
        if kind in values.CONTAINERS:
            self._container(key, value, depth)
        elif isinstance(value, functools.partial):
            for name, part in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self.below(f"{key}.{name}", part, depth + 1)
        elif isinstance(value, types.MethodType):
            self.below(f"{key}.__self__", value.__self__, depth + 1)
        elif isinstance(value, types.FunctionType):
            if frames.is_own(value.__module__ or "") and (
                value.__closure__ or vars(value) or _defaults(value)
            ):
                self._add(Cells(key, value), depth)
        elif values.is_value(value) and values.base(kind) is None:
            if depth == 0 and not self._handed(value):
                self._seen.add(id(value))
                self.found.append(Items(key, value))
        elif isinstance(value, torch.nn.Module):
            self._module(key, value, depth)
        elif isinstance(value, contextvars.ContextVar):
            self._add(Context(key, value), depth)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(key, value, depth)
        elif is_object(value) and not self._handed(value):
            self._add(Attributes(key, value), depth)
            if values.base(kind) is not None:  # a class of the script's that is a dict or a list
                self.found.append(Items(f"{key}[]", value))

    def _add(self, owner: Owner, depth: int) -> None:
        self._seen.add(id(owner.value))
        self.found.append(owner)
        for name, value in list(owner.read().items()):
            if not values.is_value(value):
                self.below(f"{owner.key}.{name}", value, depth + 1)
            elif type(value) in values.CONTAINERS and not self._handed(value):
                self._inside(f"{owner.key}.{name}", value, depth + 1)

    def _container(self, key: str, value: Any, depth: int) -> None:
        if self._handed(value):
            return
        self._seen.add(id(value))
        if type(value) in values.MUTABLE or (type(value) is tuple and any(map(_moves, value))):
            self.found.append(Items(key, value))
        self._inside(key, value, depth)

    def _inside(self, key: str, value: Any, depth: int) -> None:
        """Objects in a container: a list of meters."""
        if len(value) > _LISTED or depth > _DEPTH or isinstance(value, set | frozenset | bytearray):
            return
        for name, item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
            if is_object(item) or isinstance(item, _LEADING_ON):
                self.below(f"{key}[{name!r}]", item, depth + 1)

    def _optimizer(self, key: str, value: torch.optim.Optimizer, depth: int) -> None:
        kind = type(value)
        self._seen.add(id(value))
        if frames.is_own(kind.__module__) and kind.state_dict is torch.optim.Optimizer.state_dict:
            self._add(Beside(key, value), depth)
        self._hooks(key, value, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

    def _hooks(self, key: str, value: Any, *kinds: str) -> None:
        """What the script's own hooks have closed over: nothing else may lead there. A wrapper around an
        optimizer may be one without having any."""
        hooks = [hook for kind in kinds for hook in getattr(value, kind, {}).values()]
        own = [hook for hook in hooks if frames.is_own(getattr(hook, "__module__", None) or "lastcall")]
        for number, hook in enumerate(own):
            self.below(f"{key}.hooks[{number}]", hook, 1)

    def _module(self, key: str, value: torch.nn.Module, depth: int) -> None:
        """What a module keeps beside its state_dict(): handed over or not, no other object saves it."""
        self._seen.add(id(value))
        self.found.append(Inside(key, value))
        for name, each in value.named_modules():
            self._hooks(f"{key}.{name}" if name else key, each, "_forward_pre_hooks", "_forward_hooks")
            if not frames.is_own(type(each).__module__) or len(self.found) >= _MANY:
                continue
            owner = Attributes(f"{key}.{name}" if name else key, each)
            if owner.read():
                self.found.append(owner)


def _moves(value: Any) -> bool:
    """Whether it can be changed in place, and put back in place."""
    return (
        type(value) in values.MUTABLE or isinstance(value, torch.Tensor | np.ndarray) or movers.is_one(value)
    )


def is_object(value: Any) -> bool:
    """Whether it is a plain object of the script's: one of its classes, such a class, or a namespace."""
    kind = type(value)
    if kind in values.PLAIN or isinstance(value, _PASSED_OVER):
        return False
    if isinstance(value, type):
        return frames.is_own(value.__module__) and not issubclass(
            value, (torch.nn.Module, BaseException, enum.Enum, *_PASSED_OVER)
        )
    if (kind.__module__, kind.__qualname__) in _NAMESPACES:
        return True
    return kind.__module__ != "builtins" and frames.is_own(kind.__module__) and not classes.is_one(value)


def _tree(kind: type) -> ast.AST | None:
    """The file that a class is defined in."""
    for each in vars(kind).values():
        if isinstance(each, types.FunctionType):
            source = sources.of(each.__code__, each.__globals__)
            return source.tree if source is not None else None
    return None
