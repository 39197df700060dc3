"""What of a script's values can be saved, and whether one has changed."""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lastcall import errors
from lastcall.adapters.torch.carry import classes, frames, movers
from lastcall.adapters.torch.tensors import tensors
from lastcall.core.engine import digest
from lastcall.formats import tree

ITEMS = 20_000  # of a container
BYTES = 64 << 20  # of the tensors and arrays of one variable
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
CONTAINERS = frozenset({*_SEQUENCES, *_SETS, *_MAPPINGS, bytearray})
MUTABLE = CONTAINERS - {tuple, frozenset}
_BASES = (
    collections.Counter,
    collections.OrderedDict,
    collections.defaultdict,
    dict,
    list,
    collections.deque,
    set,
)
_SAMPLED = 4096  # bytes of an array of more than BYTES that are compared
_FACTORIES = (None, int, list, dict, set, float, str)
_TRAINS = (
    *(torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.utils.data.Sampler),
)
_GENERATOR = "Keep what it holds in variables of the loop (an index), or make it a class of yours that does."
_ROOM = "Keep what waits in it in a variable or a list of the loop, which is saved."
_flat = PLAIN.issuperset


class Unsavable(Exception):
    """Why a value is not saved, whether that can matter, and what to do, where that is not what helps with
    most values."""

    def __init__(self, because: str, *, matters: bool, remedy: str = "") -> None:
        super().__init__(because)
        self.matters = matters
        self.remedy = remedy


def is_value(value: Any) -> bool:
    """Whether it is a value of its own, and no object whose attributes are looked at."""
    kind = type(value)
    if (
        kind in PLAIN
        or kind in CONTAINERS
        or isinstance(value, torch.Tensor | np.ndarray)
        or base(kind) is not None
    ):
        return True
    return movers.is_one(value) or movers.is_pulled(value) or movers.is_room(value) or classes.is_one(value)


def base(kind: Any) -> Any:
    """The container that a class of the script's is made from; None if it is none, or a container itself."""
    if kind in CONTAINERS or not issubclass(kind, (dict, list, collections.deque, set)):
        return None
    return next((each for each in _BASES if issubclass(kind, each)), None)


def savable(value: Any, handed: Callable[[object], bool]) -> Any:
    """The value as it is saved: the same containers, tensors without their graph. Raises Unsavable."""
    if type(value) in PLAIN:
        return value
    return _Reader(handed).value(value)


def savable_object(value: Any, handed: Callable[[object], bool], is_object: Callable[[Any], bool]) -> Any:
    """An object of the script's own, as its class and its attributes. Raises Unsavable."""
    return _Reader(handed).object(value, is_object, 0)


class _Reader:
    def __init__(self, handed: Callable[[object], bool]) -> None:
        self._handed = handed
        self._items = 0
        self._bytes = 0

    def value(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if self._handed(value):
            raise Unsavable("it was handed over", matters=False)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject or kind is not np.ndarray:
                raise Unsavable("it is an array of Python objects", matters=value.dtype.hasobject)
            self._weigh(value.nbytes)
            return value
        if (isinstance(value, np.generic) and not value.dtype.hasobject) or isinstance(
            value, torch.dtype | torch.device | torch.Size
        ):
            return value
        if kind in tree.LEAVES:
            return value
        if movers.is_one(value):
            return movers.state(value)
        if classes.is_one(value):
            return self._classed(value, depth)
        if kind not in CONTAINERS and (made_from := base(kind)) is not None:
            return self._container(_as(value, made_from), made_from, depth)
        if kind not in CONTAINERS:
            raise self._unknown(value, kind, depth)
        return self._container(value, kind, depth)

    def object(self, value: Any, is_object: Callable[[Any], bool], depth: int) -> Any:
        kind = type(value)
        if self._handed(value) or not classes.is_plain(kind):
            raise self._unknown(value, kind, depth)
        if depth > 20:
            raise Unsavable("it is nested too deeply", matters=True)
        found = {
            **getattr(value, "__dict__", {}),
            **{name: getattr(value, name) for name in slots(kind) if hasattr(value, name)},
        }
        made = {
            name: self.object(each, is_object, depth + 1) if is_object(each) else self.value(each, depth + 1)
            for name, each in found.items()
        }
        return classes.object_state(kind, made)

    def _classed(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple):
            self._count(len(value))
        saved = classes.state(value, lambda item: self.value(item, depth + 1))
        if saved is None:
            raise Unsavable(
                f"its class `{type(value).__qualname__}` cannot be found by its name", matters=True
            )
        return saved

    def _unknown(self, value: Any, kind: type, depth: int) -> Unsavable:
        """An object. Functions and parts of torch matter where they are kept in a container that changes, or
        made in the loop."""
        if isinstance(value, types.GeneratorType) or movers.is_pulled(value):
            return Unsavable(movers.described(value), matters=movers.is_pulled(value), remedy=_GENERATOR)
        if movers.is_room(value):
            because = f"tensors wait in it from one step to the next, and it is a `{kind.__qualname__}`"
            return Unsavable(because, matters=bool(movers.waiting(value)), remedy=_ROOM)
        own = frames.is_own(kind.__module__) and not callable(value)
        kept = depth > 0 and isinstance(value, types.FunctionType) and frames.is_own_code(value.__code__)
        return Unsavable(f"it is a `{kind.__qualname__}`", matters=own or kept or isinstance(value, _TRAINS))

    def _container(self, value: Any, kind: type, depth: int) -> Any:
        self._count(len(value))
        if kind is bytearray:
            return value
        if depth > 20:
            raise Unsavable("it is nested too deeply", matters=True)
        if kind in _MAPPINGS:
            if isinstance(value, collections.defaultdict) and value.default_factory not in _FACTORIES:
                raise Unsavable("it is a defaultdict whose factory is a function of your own", matters=True)
            if _flat(map(type, value)) and _flat(map(type, value.values())):
                return value
            made = {self.value(key, depth + 1): self.value(item, depth + 1) for key, item in value.items()}
            if isinstance(value, collections.defaultdict):
                return collections.defaultdict(value.default_factory, made)
            return _filled(kind(), made, getattr(value, "__dict__", {}))
        if _flat(map(type, value)):
            return value
        items = [self.value(item, depth + 1) for item in value]
        return collections.deque(items, value.maxlen) if isinstance(value, collections.deque) else kind(items)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        try:
            tensors.check(value, "it")
        except errors.StateError as error:
            raise Unsavable(str(error), matters=True) from error
        if self._handed(value.untyped_storage().data_ptr()):
            raise Unsavable("it shares memory with what was handed over", matters=True)
        self._weigh(value.nbytes)
        return value if value.is_leaf else value.detach()

    def _count(self, items: int) -> None:
        self._items += items
        if self._items > ITEMS:
            raise Unsavable(f"it holds more than {ITEMS:,} items", matters=True)

    def _weigh(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > BYTES:
            raise Unsavable(f"it holds more than {BYTES >> 20} MB", matters=True)


class _Itself:
    """Equal for one tensor as long as it lives. Not its id(): a loop that replaces a tensor in each pass is
    given the same addresses again and again."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: torch.Tensor) -> None:
        self._ref = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return mine is not None and isinstance(other, _Itself) and mine is other._ref()


def mark(value: Any, depth: int = 0) -> Any:
    """Something to compare with later: equal to the mark of the same value, while nothing in it has
    changed."""
    kind = type(value)
    if kind in PLAIN:
        return (kind, value) if value == value else (kind, repr(value))
    if isinstance(value, torch.Tensor):
        return (_Itself(value), value._version, tuple(value.shape))
    if isinstance(value, np.ndarray):
        return (id(value), value.shape, _digest(value))
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if movers.is_one(value):
        return movers.mark(value)
    if isinstance(value, types.GeneratorType) or movers.is_pulled(value):
        return (id(value), movers.stand(value))
    if movers.is_room(value):
        return tuple(map(id, movers.waiting(value)))
    if kind not in CONTAINERS and (made_from := base(kind)) is not None:
        return mark(_as(value, made_from), depth)
    if classes.is_one(value) and not isinstance(value, tuple):
        return (kind, value)
    if classes.is_named(value):
        return (kind, tuple(mark(item, depth + 1) for item in value))
    if kind not in CONTAINERS:
        return id(value)
    if depth > 4 or len(value) > ITEMS:
        return (kind, len(value))
    if kind in _MAPPINGS:
        return (
            kind,
            tuple(
                (key if type(key) in PLAIN else id(key), mark(item, depth + 1)) for key, item in value.items()
            ),
        )
    if kind in _SETS:
        return (kind, len(value), frozenset(item if type(item) in PLAIN else id(item) for item in value))
    if kind is bytearray:
        return bytes(value)
    if _flat(map(type, value)):
        return (kind, tuple(value))
    return (kind, tuple(mark(item, depth + 1) for item in value))


def put(live: Any, saved: Any) -> bool:
    """Make a live value the saved one in place, so that other holders see it too. False where it must be
    replaced."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if live.shape != saved.shape or live.dtype != saved.dtype or live.requires_grad or not live.is_leaf:
            return False
        if live.layout is not torch.strided or 0 in live.stride():
            return False
        live.copy_(saved)
        return True
    if isinstance(live, np.ndarray) and isinstance(saved, np.ndarray):
        if live.shape != saved.shape or live.dtype != saved.dtype or not live.flags.writeable:
            return False
        live[...] = saved
        return True
    if movers.is_state(saved):
        return movers.put(live, saved)
    if type(live) is tuple and type(saved) is tuple and len(live) == len(saved):
        done = [type(item) in PLAIN or put(one, item) for one, item in zip(live, saved, strict=True)]
        return all(done)
    if (base(type(live)) or type(live)) is not type(saved) or type(saved) not in MUTABLE or live is saved:
        return live is saved
    if isinstance(live, collections.deque) and live.maxlen != saved.maxlen:
        return False
    _refill(live, saved)
    return True


def _refill(live: Any, saved: Any) -> None:
    """Containers inside stay the same objects, too; tensors do not: they may be views of something else. The
    methods are those of the container itself: a class of the script's may have its own, with effects."""
    if isinstance(live, dict):
        kept = {key: _same(dict.get(live, key), item) for key, item in saved.items()}
        _mapping(live).clear(live)
        _filled(live, kept, getattr(saved, "__dict__", {}))
    elif isinstance(live, set):
        set.clear(live)
        set.update(live, saved)
    elif isinstance(live, bytearray):
        live[:] = saved
    else:
        kind: Any = list if isinstance(live, list) else collections.deque
        old = [*kind.__iter__(live), *[None] * max(0, len(saved) - len(live))]
        items = [_same(old[at], item) for at, item in enumerate(saved)]
        kind.clear(live)
        kind.extend(live, items)


def _same(live: Any, saved: Any) -> Any:
    """What stands for a saved item: the live one, where it was made the same."""
    return live if type(saved) in MUTABLE and put(live, saved) else saved


def _filled(into: Any, items: dict[Any, Any], attributes: dict[str, Any]) -> Any:
    kind = _mapping(into)
    for key, item in items.items():
        kind.__setitem__(into, key, item)  # and not update(): a Counter's would add
    if attributes:
        vars(into).update(attributes)
    return into


def _mapping(value: Any) -> Any:
    """Whose methods fill it: a dict's leave an OrderedDict without an order, and it seems empty."""
    return collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict


def _as(value: Any, kind: Any) -> Any:
    """What a container of the script's own class holds."""
    if kind is collections.defaultdict:
        return collections.defaultdict(value.default_factory, dict.items(value))
    if kind is collections.deque:
        return collections.deque(collections.deque.__iter__(value), value.maxlen)
    if issubclass(kind, dict):
        return _filled(kind(), dict(_mapping(value).items(value)), {})
    return kind(kind.__iter__(value))


def _digest(array: np.ndarray[Any, Any]) -> object:
    """Of an array, or of a few parts of a large one."""
    if array.dtype.hasobject:
        return None
    if array.nbytes <= BYTES:
        return digest.of(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else None
    return digest.of(
        np.ascontiguousarray(array.reshape(-1)[:: max(1, array.size // _SAMPLED)]).view(np.uint8).data
    )


def slots(kind: type) -> list[str]:
    """The attributes of its objects that are in no dict."""
    found = []
    for each in kind.__mro__:
        own = vars(each).get("__slots__", ())
        names = [
            name
            for name in ((own,) if isinstance(own, str) else tuple(own))
            if name not in ("__dict__", "__weakref__")
        ]
        found += [
            f"_{each.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n
            for n in names
        ]
    return found


def code_of(value: object) -> object:
    """What a function does, and for which object: the same for each one that is made by the same line. None
    for what is no function."""
    if isinstance(value, types.MethodType):
        return value.__func__, id(value.__self__)
    if isinstance(value, functools.partial):
        return code_of(value.func)
    return value.__code__ if isinstance(value, types.FunctionType) else value if callable(value) else None


def is_silent(value: object) -> bool:
    """What a script holds by the dozen and no trajectory depends on."""
    return isinstance(
        value, type | types.FunctionType | types.ModuleType | types.MethodType | types.BuiltinFunctionType
    )
