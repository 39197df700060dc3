"""Objects with a position inside that a script moves on: random generators of its own, `itertools.count()`,
iterators over a list or a range. They are saved as where they are, and put there in place: a resumed script
has made them as it did before, and they stand at their beginning.

A generator function that a loop pulls from has its position in a frame, and that cannot be restored: it is
named. So are iterators made of others (`cycle(batches)`, `zip(a, b)`), and a queue or a future in which
tensors wait for the next step: threads may be at both ends of it.
"""

from __future__ import annotations

import ast
import asyncio
import collections
import concurrent.futures
import gc
import itertools
import operator
import os
import queue
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_dataloader

from lastcall.adapters.torch.carry import frames
from lastcall.adapters.torch.state import generators

TAG = "lastcall.moved"
_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.RandomState,
    np.random.Generator,
    np.random.BitGenerator,
)
_MADE: tuple[Any, ...] = (
    [],
    (),
    range(0),
    range(1 << 70),
    "",
    b"",
    reversed([]),
    {},
    {}.values(),
    {}.items(),
)
_SIZED = tuple(type(iter(made)) for made in _MADE)  # they know how many are left
_DRAWN = (DataLoader, getattr(torch_dataloader, "_BaseDataLoaderIter", DataLoader))
_CHAINED = frozenset(
    {zip, enumerate, map, filter, *(kind for kind in vars(itertools).values() if isinstance(kind, type))}
) - {
    itertools.count,
    itertools.repeat,
}
_ROOMS = (queue.Queue, queue.SimpleQueue, concurrent.futures.Future, asyncio.Queue, asyncio.Future)
_SHELVES = frozenset({dict, list, tuple, collections.deque})
_DEEP = 6
_MOST = 10_000_000  # items that are passed over to come to a position


def is_one(value: object) -> bool:
    if isinstance(value, _GENERATORS):
        return not isinstance(value, random.SystemRandom) and id(value) not in _shared()
    return type(value) in _SIZED or type(value) is itertools.count


def _shared() -> frozenset[int]:
    """The generators of the process, which are saved with it."""
    return frozenset(
        map(
            id,
            (np.random.mtrand._rand, random._inst, torch.default_generator, *torch.cuda.default_generators),
        )
    )


def state(value: Any) -> dict[str, Any]:
    """Where it is now, as a value that can be saved."""
    if isinstance(value, _GENERATORS):
        return {TAG: "generator", "v": generators.GeneratorPart(value).copy()}
    if type(value) is itertools.count:
        return {TAG: "count", "v": _count(value)[0]}
    return {TAG: "left", "v": operator.length_hint(value)}


def mark(value: Any) -> object:
    """Something to compare with later."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return repr(state(value)["v"])


def is_state(value: object) -> bool:
    return isinstance(value, dict) and TAG in value


def put(live: Any, saved: dict[str, Any]) -> bool:
    """Bring a live one to where the saved one was. False where it is another kind of object, or beyond
    that."""
    kind, at = saved[TAG], saved["v"]
    if kind == "generator" and isinstance(live, _GENERATORS):
        generators.GeneratorPart(live).put(at)
        return True
    if kind == "count" and type(live) is itertools.count:
        now, step = _count(live)
        passes, rest = divmod(at - now, step) if step else (0, 0)
        return not rest and _pass(live, passes)
    return kind == "left" and type(live) in _SIZED and _pass(live, operator.length_hint(live) - at)


def _count(value: itertools.count[Any]) -> tuple[Any, Any]:
    """The next number and the step, from `count(5, 2)`."""
    arguments = ast.literal_eval(repr(value).removeprefix("count"))
    found = arguments if isinstance(arguments, tuple) else (arguments,)
    return found[0], found[1] if len(found) > 1 else 1


def _pass(live: Iterator[Any], items: int) -> bool:
    if not 0 <= items <= _MOST:
        return False
    next(itertools.islice(live, items, items), None)
    return True


# ---- generator functions -----------------------------------------------------------------------------------


def is_pulled(value: object) -> bool:
    """Whether it is a generator of the script's, or an iterator made of others (`cycle(batches)`), that hands
    out something else than the batches of a loader, whose position is known."""
    own = isinstance(value, types.GeneratorType) and frames.is_own_code(value.gi_code)
    return (own or type(value) in _CHAINED) and not _draws(value)


def _draws(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(_DEEP):
        if any(isinstance(one, _DRAWN) or _is_ours(one) for one in level):
            return True
        level = [
            one for each in level for one in gc.get_referents(each) if _leads_on(one) or _is_held(each, one)
        ]
    return False


def _is_held(by: object, value: object) -> bool:
    """What a zip() pulls from is in a tuple."""
    return type(value) is tuple and type(by) in _CHAINED


def _leads_on(value: object) -> bool:
    return isinstance(value, (types.GeneratorType, types.FrameType, types.CellType, *_DRAWN)) or hasattr(
        type(value), "__next__"
    )


def _is_ours(value: object) -> bool:
    return (
        isinstance(value, types.GeneratorType)
        and not frames.is_own_code(value.gi_code)
        and "lastcall" in value.gi_code.co_filename
    )


def stand(value: Any) -> object:
    """Something to compare with later: where it is, and its plain variables."""
    if not isinstance(value, types.GeneratorType):
        return _chained(value)
    frame = value.gi_frame
    if frame is None:
        return None
    own = frames.variables(frame)
    return frame.f_lasti, tuple(
        (name, each) for name, each in own.items() if isinstance(each, int | float | str | bool | None)
    )


def _chained(value: object) -> object:
    """Where those stand that an iterator is made of, and what it holds."""
    level, found = [value], list[object]()
    for _ in range(_DEEP):
        level = [one for each in level for one in gc.get_referents(each) if not isinstance(one, type)]
        found += [_at(one) for one in level]
        level = [one for one in level if type(one) in _CHAINED or type(one) is tuple]
    return tuple(found)


def _at(value: object) -> object:
    if type(value) in _SIZED:
        return operator.length_hint(value)
    return stand(value) if isinstance(value, types.GeneratorType) else id(value)


def described(value: Any) -> str:
    if not isinstance(value, types.GeneratorType):
        return f"it is a `{type(value).__name__}`, and its position cannot be known"
    code = value.gi_code
    return (
        f"it is a generator (`{code.co_qualname}`, "
        f"{os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    )


# ---- rooms: where values wait for who takes them -----------------------------------------------------------


def is_room(value: object) -> bool:
    return isinstance(value, _ROOMS)


def waiting(value: object) -> list[Any]:
    """The tensors and arrays that wait in a room. Whatever else waits there (a number to be written down, the
    end of a job in the background) decides nothing."""
    level, found = [value], []
    for _ in range(_DEEP):
        level = [one for each in level for one in gc.get_referents(each)]
        found += [one for one in level if isinstance(one, torch.Tensor | np.ndarray)]
        level = [one for one in level if type(one) in _SHELVES]
    return found
