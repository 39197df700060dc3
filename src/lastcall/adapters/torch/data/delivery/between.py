"""What stands between a loader and the loop that draws from it: iterators and generators, found from the
loader's iterator upwards.

Most only hand on what they get. Two kinds do not, and a resumed script starts them from the beginning:
`itertools.cycle` keeps the first pass and repeats it without asking again, and a generator may carry
something from one batch to the next (samples that are left over, a counter). What a generator carries are the
local variables that it reads again, behind the `yield` where it waits, before it sets them.
"""

from __future__ import annotations

import collections
import dis
import gc
import inspect
import itertools
import operator
import os
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lastcall.adapters.torch.loop import counting
from lastcall.core.checkpoint.doubts import Doubts
from lastcall.script.source import scopes

_FOR_ITER = dis.opmap.get("FOR_ITER")  # None on another Python
_DEEP = 4  # iterators around an iterator that are looked at
_HANDING_ON = (
    zip,
    map,
    filter,
    enumerate,
    itertools.chain,
    itertools.islice,
    itertools.starmap,
    itertools.takewhile,
    itertools.zip_longest,
)
_KINDS = (itertools.cycle, types.GeneratorType, *_HANDING_ON)
_CONTAINERS = (list, dict, set, collections.deque)
_VALUES = (int, float, str, bytes, tuple, torch.Tensor, np.ndarray, *_CONTAINERS)
_PARTS: tuple[type, ...] = (type(iter(())), type(iter([])))
_COUNTERS = (type(iter(range(0))), itertools.count)


def look(iterator: object, loader: str, doubts: Doubts) -> None:
    """Say what is between that cannot be brought back."""
    for one in _around(iterator):
        if isinstance(one, itertools.cycle):
            doubts.add(
                f"`{loader}` is drawn from through itertools.cycle(), which keeps the batches of the first "
                "pass and repeats them",
                "Use a generator that begins a new pass: `def forever(loader):` `while True: yield from "
                "loader`.",
            )
        elif isinstance(one, itertools.chain) and _goes_on(gc.get_referents(one)):
            doubts.add(
                f"`{loader}` is drawn from through itertools.chain(), which begins with the first of its "
                "parts again in a resumed run",
                "Iterate over it with run.batches(), which makes a pass again from its beginning.",
            )
        elif isinstance(one, itertools.islice) and counting.step_of(one) != 1:
            doubts.add(
                f"`{loader}` is drawn from through itertools.islice() with a step, which starts from the "
                "beginning in a resumed run",
                "Skip the batches in between yourself, or iterate over it with run.batches().",
            )
        elif isinstance(one, types.GeneratorType):
            for name in carried(one):
                code = one.gi_code
                doubts.add(
                    f"the generator `{code.co_qualname}` "
                    f"({os.path.basename(code.co_filename)}:{code.co_firstlineno}) carries `{name}` "
                    f"from one batch of `{loader}` to the next",
                    "Iterate over it with run.batches(), which makes a pass again from its beginning.",
                )


def _goes_on(parts: list[Any]) -> bool:
    """Whether some parts of a chain are still to come. Not of our own, around the first batches of
    run.batches()."""
    ours = any(
        isinstance(part, types.GeneratorType) and part.gi_code.co_filename == counting.__file__
        for part in parts
    )
    return not ours and any(isinstance(part, _PARTS) and operator.length_hint(part) > 0 for part in parts)


def look_for_counts(iterator: object, loader: str, doubts: Doubts) -> None:
    """Of a loader's own `__iter__`, where run.batches() goes through it: `for _ in range(len(self)): yield
    next(self.iterator)`."""
    if isinstance(iterator, types.GeneratorType) and any(
        isinstance(one, _COUNTERS) for one in gc.get_referents(iterator)
    ):
        code = iterator.gi_code
        doubts.add(
            f"the generator `{code.co_qualname}` "
            f"({os.path.basename(code.co_filename)}:{code.co_firstlineno}) counts the batches of "
            f"`{loader}` on its own, and starts from zero in a resumed epoch",
            "Use DataLoader(..., persistent_workers=True), which keeps its workers from epoch to epoch.",
        )


def look_for_calls(frame: types.FrameType | None, loader: str, doubts: Doubts) -> None:
    """The function by which run.batches() is drawn from, where it is not the loop itself, and no iterator: as
    more_itertools.peekable's peek(), which is ahead of the step that uses what it gets."""
    while frame is not None and frame.f_code.co_name != "_batches":
        frame = frame.f_back
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("lastcall"):
        frame = frame.f_back
    if (
        frame is None
        or frame.f_code.co_flags & inspect.CO_GENERATOR
        or frame.f_code.co_name in ("__next__", "<module>")
    ):
        return
    code = frame.f_code
    if _FOR_ITER is None:
        return  # nothing tells the loop from a call
    if frame.f_lasti >= 0 and code.co_code[scopes.instruction(frame)] == _FOR_ITER:
        return  # the loop itself
    doubts.add(
        f"`{code.co_qualname}` ({os.path.basename(code.co_filename)}:{frame.f_lineno}) draws batches of "
        f"`{loader}` from run.batches() "
        "before the steps that use them",
        "Let the loop iterate over run.batches() itself; run.batch and len(run.batches(...)) tell whether a "
        "batch is the last.",
    )


def cycled(iterator: object) -> bool:
    return any(isinstance(one, itertools.cycle) for one in _around(iterator))


def _around(iterator: object) -> list[Any]:
    found: list[Any] = []
    level = [iterator]
    for _ in range(_DEEP):
        level = [
            one
            for one in gc.get_referrers(*level)
            if type(one) in _KINDS and all(one is not known for known in found)
        ]
        if not level:
            break
        found += level
    return found


def carried(generator: types.GeneratorType[Any, Any, Any]) -> list[str]:
    """The local variables of a generator that waits which hold what an earlier batch left there."""
    code, frame = generator.gi_code, generator.gi_frame
    if frame is None or generator.gi_running:
        return []
    code_list = list(dis.get_instructions(code))
    stores = collections.Counter(name for one in code_list if _stores(one) for name in _names(one))
    stores.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    found = [
        name
        for name, value in frame.f_locals.items()
        if isinstance(value, _VALUES)
        and not isinstance(value, bool)
        and stores[name] > 1
        and _live(name, code_list, frame.f_lasti)
    ]
    if (
        not found
        and "set_epoch" in code.co_names
        and any(isinstance(one, _COUNTERS) for one in gc.get_referents(generator))
    ):
        found = ["epoch"]
    return found


def _live(name: str, code: list[dis.Instruction], after: int) -> bool:
    """Whether some way on from there reads the variable before it is set."""
    place = {one.offset: index for index, one in enumerate(code)}
    waiting = [place[after] + 1]
    seen: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index in seen or index >= len(code):
            continue
        seen.add(index)
        one = code[index]
        if name in _names(one):
            if _loads_first(one, name):
                return True
            continue
        if one.opname in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"):
            continue
        waiting += [place[target] for target in _targets(one) if target in place]
        if not _always_jumps(one):
            waiting.append(index + 1)
    return False


def _targets(one: dis.Instruction) -> Iterator[int]:
    if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
        yield int(one.argval)


def _always_jumps(one: dis.Instruction) -> bool:
    return one.opname in ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")


def _names(one: dis.Instruction) -> tuple[str, ...]:
    if "_FAST" not in one.opname and "_DEREF" not in one.opname:
        return ()
    return one.argval if isinstance(one.argval, tuple) else (one.argval,)


def _stores(one: dis.Instruction) -> bool:
    return one.opname.startswith(("STORE_FAST", "STORE_DEREF"))


def _loads_first(one: dis.Instruction, name: str) -> bool:
    """Also of the instructions for two variables of newer Pythons: `STORE_FAST_LOAD_FAST (a, b)`."""
    parts = one.opname.split("_FAST")
    return _names(one).index(name) < len(parts) and "LOAD" in parts[_names(one).index(name)]
