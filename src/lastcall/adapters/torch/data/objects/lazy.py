"""Draws that move the process's own generators in the middle of a pass: what they were before, so that the
draw can be made again.

A sampler that shuffles chunk by chunk, or a stream with a shuffle buffer, draws from generators that training
draws from as well. What is replayed after a resume must find them as they were. Only those that have moved
are kept, and only so many times in a pass: a state is 2.5 to 5 KB.
"""

from __future__ import annotations

import collections
import struct
import types
from typing import Any

import torch

from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.randomness import mersenne
from lastcall.adapters.torch.randomness import rng as process

MOST = 256  # states kept of one pass


class Watch:
    """Looks at the generators before and after a draw: 1 µs each where nothing has moved, 10 where training
    has."""

    def __init__(self) -> None:
        self._randomness = process.Randomness()

    def before(self) -> process.Noted:
        return self._randomness.note()

    def moved(self, before: process.Noted) -> rng.Parts | None:
        """What those that have moved since were before; None where none has."""
        after = self._randomness.note()
        if (
            type(before) is tuple
            and type(after) is tuple
            and before[0] is after[0]
            and before[1] == after[1]
            and before[2] is after[2]
        ):
            return None
        then, now = self._randomness.captured(before), self._randomness.captured(after)
        torch_part = None if torch.equal(then.torch, now.torch) else then.torch.numpy().tobytes()
        python_part = None if then.python == now.python else _python(then.python)
        numpy_part = None if then.numpy == now.numpy else _numpy(then.numpy)
        parts = (torch_part, python_part, numpy_part)
        return None if parts == (None, None, None) else parts


def _words(state: Any) -> mersenne.Words:
    return state if isinstance(state, mersenne.Words) else state.words()


def _python(state: Any) -> tuple[int, bytes, str | None]:
    words = _words(state)
    return (
        3,
        struct.pack("<625I", *struct.unpack("=624I", words.key), words.pos),
        None if words.gauss is None else words.gauss.hex(),
    )


def _numpy(state: Any) -> Any:
    if state is None or isinstance(state, dict):
        return None  # another bit generator than numpy's own: it is not put back
    words = _words(state)
    key = ("array", "<u4", struct.pack("<624I", *struct.unpack("=624I", words.key)))
    inner = ("dict", (("key", key), ("pos", words.pos)))
    gauss = ("float", float(words.gauss or 0.0).hex())
    return (
        "dict",
        (
            ("bit_generator", "MT19937"),
            ("state", inner),
            ("has_gauss", int(words.gauss is not None)),
            ("gauss", gauss),
        ),
    )


Buffers = dict[int, tuple[int, ...]]


def buffers(iterator: Any) -> Buffers:
    """The containers that a running stream keeps between two samples, by id, with what is in them: a shuffle
    buffer is among them."""
    found: Buffers = {}
    seen: set[int] = set()
    waiting = [(iterator, 0)]
    while waiting and len(seen) < 200:
        value, depth = waiting.pop()
        if value is None or id(value) in seen or depth > 6:
            continue
        seen.add(id(value))
        if isinstance(value, list | collections.deque | dict | set):
            items = list(value.values() if isinstance(value, dict) else value)
            found[id(value)] = (len(items), *map(id, items[:64]))
        elif isinstance(value, types.GeneratorType):
            inner = {} if value.gi_frame is None else value.gi_frame.f_locals
            waiting.extend((item, depth + 1) for item in (value.gi_yieldfrom, *inner.values()))
        elif type(value).__module__ != "builtins" and isinstance(getattr(value, "__dict__", None), dict):
            waiting.extend((item, depth + 1) for item in vars(value).values())
    return found


def keeps(before: Buffers, after: Buffers) -> bool:
    return any(key in after and after[key] != content for key, content in before.items())
