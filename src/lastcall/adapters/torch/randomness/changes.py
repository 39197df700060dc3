"""Whether one of the process's generators has moved, told from a hundred bytes.

A loader that is a batch ahead must know the randomness before every batch, and hardly any batch is made with
it. To copy it costs 9 to 14 µs in the middle of a training step, where neither code nor words are in the
cache; to look at the marks costs one.

A twister's mark is its position, its first words and its last ones. A draw moves the position, and every 624
draws all words are regenerated; the spare normal numbers, which can be used up without a draw, belong to the
mark.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from lastcall.adapters.torch.randomness import mersenne

_KEY = 624 * 4
# bytes behind torch's words: the spare normal numbers. What lies behind those would only make for a copy too
# many
_AFTER = 36
_BEFORE = 20  # seed, words left, seeded, next
_ROOM = 512  # bytes of the generator's object among which its words begin


class Watched:
    """Where to look. Only for as long as numpy has the bit generator that it had: the caller asks for
    that."""

    def __init__(self, python: mersenne.Python, numpy: mersenne.Numpy, words: tuple[memoryview, ...]) -> None:
        self.python: Any = python.instance
        self.numpy: Any = numpy.mtrand
        self.bits: Any = numpy.generator
        self.words = words  # see twisters.apart()
        torchs = _torch_marks()
        self.knows_torch = bool(torchs)
        head, tail = 12, 2500 - 12
        self.marks = (words[0][:head], words[0][tail:], words[1][:head], words[1][tail:], words[2], *torchs)


def watch(python: mersenne.Python, numpy: mersenne.Numpy | None) -> Watched | None:
    """None where one of the two cannot be read as raw words."""
    if numpy is None or python.view is None or numpy.view is None:
        return None
    return Watched(python, numpy, (python.view, numpy.view, numpy.spare))


def _torch_marks() -> tuple[memoryview, ...]:
    """Of torch's CPU generator; nothing where its words do not lie where they are thought to. That is proved,
    not believed, with a private one: its mark moves with a draw, and with a normal number that was kept from
    the draw before."""
    private = torch.Generator().manual_seed(5)
    place = _place(private)
    seen = [_mark(private, place)] if place else []
    for _ in range(2):
        torch.randn((), generator=private)
        seen += [_mark(private, place)] if place else []
    if (
        len(set(seen)) != 3
        or seen[1][:_BEFORE] != seen[2][:_BEFORE]
        or _place(torch.default_generator) != place
    ):
        return ()
    return _views(torch.default_generator, place)


def _place(generator: torch.Generator) -> int:
    """Where in the generator's object its words begin; 0 where they are not found."""
    address = getattr(generator, "_cdata", None)
    if not isinstance(address, int) or not address:
        return 0
    wide = bytes(generator.get_state().numpy())[24 : 24 + 2 * _KEY]  # each word in eight bytes
    words = b"".join(wide[at : at + 4] for at in range(0, 2 * _KEY, 8))
    place = ctypes.string_at(address, _ROOM).find(words[:64])
    return place if place >= _BEFORE and ctypes.string_at(address + place, _KEY) == words else 0


def _views(generator: torch.Generator, place: int) -> tuple[memoryview, memoryview]:
    first = int(generator._cdata) + place  # type: ignore[attr-defined]
    return mersenne.at(first - _BEFORE, _BEFORE + 8), mersenne.at(first + _KEY - 8, 8 + _AFTER)


def _mark(generator: torch.Generator, place: int) -> bytes:
    return b"".join(_views(generator, place))
