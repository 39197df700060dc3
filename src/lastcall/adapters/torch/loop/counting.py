"""The counters around run.batches(): `enumerate` and `islice`, which begin at 0 again in an epoch that is
resumed in its middle.

A script that breaks, accumulates or sets a learning rate by the index would then train something else. So the
counter that is pulling is found (it and everything between refer to the iterator, or are Python frames that
wait for it) and set forward by as many batches as earlier incarnations had trained; one around a look-ahead
that holds a batch back lags behind them. Both keep their count as a C integer that they read after the inner
next() has returned; where that lies is looked up on a counter of our own first, and where it is not found the
first incarnation says so.

`enumerate` could be told from the source, too; but not the one in a library's function that the loader is
handed to.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from lastcall.core.checkpoint.doubts import Doubts

_HEAD = object.__basicsize__
_WORD = ctypes.sizeof(ctypes.c_ssize_t)
_BETWEEN = (zip, map, filter, itertools.chain, itertools.starmap, itertools.takewhile, itertools.zip_longest)
_KINDS = (enumerate, itertools.islice, types.GeneratorType, *_BETWEEN)
Itself = list["weakref.ref[object]"]  # the iterator of run.batches(): not held, or it would never be dropped
_RANGES = (type(iter(range(0))), type(iter(range(1 << 70))))
_DEEP = 20  # iterators around an iterator that are looked at
_LAGS = (2, 3)  # batches at which it shows how far a counter is behind them
_LOOKS = (4, 8)  # batches at which a fresh loop is looked at: the counter must have gone on by the difference
_LONGEST = "itertools.zip_longest"
_REMEDY = "Use `run.batch`, which is right in a resumed epoch."


class Counter(NamedTuple):
    kind: str
    # an enumerate or an islice; never kept: a loop that is left by `break` must be able to end
    counter: object

    @property
    def value(self) -> int:
        return _word(self.counter, 0 if self.kind == "enumerate" else 4).value

    def advance(self, by: int) -> None:
        if self.kind == "enumerate":
            _word(self.counter, 0).value += by
        else:
            _word(self.counter, 4).value = _word(self.counter, 1).value = by

    def over(self, by: int) -> bool:
        """Whether it has had enough: an islice that asked for no more batches than these."""
        return self.kind == "islice" and 0 <= _word(self.counter, 2).value <= by

    def renewed(self, by: int) -> bool:
        """Whether it is one of several in a row: an islice that never asked for so many batches
        (more_itertools.chunked)."""
        return self.kind == "islice" and 0 <= _word(self.counter, 2).value < by

    @property
    def plain(self) -> bool:
        """Whether it hands on what it gets, from the first one on."""
        return self.kind == "enumerate" or (
            _word(self.counter, 1).value == _word(self.counter, 4).value and _word(self.counter, 3).value == 1
        )


def find(iterator: object, frame: types.FrameType | None) -> list[Counter]:
    """The counters that pull this iterator, innermost first. `frame`: the Python frame that waits for it."""
    around = [one for one in gc.get_objects() if type(one) in _KINDS]
    found: list[Counter] = []
    below: Any = iterator
    for _ in range(_DEEP):
        above = next((one for one in around if one is not below and _pulls(one, below)), None)
        if above is None:
            above, frame = _waiting(frame, around)
        if above is None:
            break
        if type(above) in (enumerate, itertools.islice):
            found.append(Counter(type(above).__name__, above))
        below = above
    return found


class Counting:
    """Of one run. A fresh loop is looked at once, a resumed one before its first batch."""

    def __init__(self, doubts: Doubts, lags: list[int]) -> None:
        self._doubts = doubts
        self._lags = lags  # by counter, innermost first: batches that had come, less those counted
        self._known = False  # the counters of this incarnation's loops count batches, or were doubted
        self._seen: list[int] = []

    def resume(self, itself: Itself, frame: types.FrameType | None, by: int, again: int) -> bool:
        """The loop continues after `by` batches. False if it would not have gone on. `frame`: what waits for
        its first batch; `again`: batches that the script had read ahead, and draws once more."""
        if not known():
            return True  # the first incarnation has said so
        counters = [counter for counter in find(itself[0](), frame) if not counter.renewed(by)]
        self._known = True
        if any(counter.over(by) for counter in counters):
            return False
        lags = [*self._lags, *[0] * len(counters)]
        for counter, lag in zip(counters, lags, strict=False):
            counter.advance(by - max(0, lag - again))
        return True

    def watched(self, batches: Iterator[Any], itself: Itself) -> Iterator[Any]:
        """The same batches; the first ones are looked at."""
        return batches if self._known else itertools.chain(self._looked_at(batches, itself), batches)

    def _looked_at(self, batches: Iterator[Any], itself: Itself) -> Iterator[Any]:
        self._seen = []
        for number in range(1, _LOOKS[-1] + 1):
            if number == 1 or number in (*_LAGS, *_LOOKS):
                frame = sys._getframe().f_back  # that of run.batches()
                iterator, waits = itself[0](), frame and frame.f_back
                self._look(find(iterator, waits), waits, number, _beside(iterator) if number == 1 else "")
                del iterator, waits
                del frame  # it would keep alive what the script has dropped
            if self._known:
                return
            try:
                yield next(batches)
            except StopIteration:
                return

    def _look(self, counters: list[Counter], frame: types.FrameType | None, number: int, beside: str) -> None:
        where = f" ({_line(frame)})" if frame is not None else ""
        if beside == _LONGEST:
            self._doubt(
                f"of what {_LONGEST} pulls beside run.batches(){where}, a shorter one that had ended begins "
                "again when it is resumed"
            )
        elif beside:
            self._doubt(
                f"`{beside}` beside run.batches(){where}, in a zip(), starts from the beginning in a "
                "resumed epoch"
            )
        elif not counters:
            self._known = True
        elif not known():
            self._doubt(
                f"the count of {_names(counters)} around run.batches(){where} cannot be set on this Python"
            )
        elif number == 1 and not all(counter.plain for counter in counters):
            self._doubt(f"the islice around run.batches(){where} has a start or a step")
        elif number in _LAGS:
            self._lags[:] = [max(0, number - 1 - counter.value) for counter in counters]
        elif number in _LOOKS:
            now = [counter.value for counter in counters]
            gone_on = [after - before for before, after in zip(self._seen, now, strict=False)]
            renewed = any(counter.kind == "islice" and counter.value != number - 1 for counter in counters)
            if renewed or any(by != _LOOKS[1] - _LOOKS[0] for by in gone_on):
                self._doubt(
                    f"the count of {_names(counters)} around run.batches(){where} is not that of the batches"
                )
            self._seen = now
            self._known = self._known or number == _LOOKS[-1]

    def _doubt(self, reason: str) -> None:
        self._known = True
        self._doubts.add(reason, _REMEDY)


@functools.cache
def known() -> bool:
    """Whether the counts lie where they are looked for: tried on counters of our own."""
    one, other = enumerate(iter("abcd"), 1 << 20), itertools.islice(iter("abcd"), 0, 1 << 21, 1)
    tried = Counter("enumerate", one), Counter("islice", other)
    try:
        if [counter.value for counter in tried] != [1 << 20, 0] or [
            _word(other, at).value for at in (1, 2, 3)
        ] != [0, 1 << 21, 1]:
            return False
        for counter in tried:
            next(counter.counter)  # type: ignore[call-overload]
            counter.advance(3)
        return next(one) == ((1 << 20) + 4, "b") and next(other) == "b" and tried[1].value == 4
    except Exception:
        return False


def step_of(counter: object) -> int:
    """Of an islice; 1 where unknown."""
    return _word(counter, 3).value if known() else 1


def _word(counter: object, place: int) -> ctypes.c_ssize_t:
    """enumerate: its count comes first. islice: the iterator, the next one wanted, the end, the step, the
    count."""
    return ctypes.c_ssize_t.from_address(id(counter) + _HEAD + place * _WORD)


def _pulls(above: object, below: object) -> bool:
    if type(above) is types.GeneratorType:
        return False  # while it waits its frame tells; one that does not wait pulls nothing
    referents = gc.get_referents(above)
    return any(
        one is below or (type(one) is tuple and any(part is below for part in one)) for one in referents
    )


def _beside(iterator: object) -> str:
    """A counter that a zip() pulls together with this iterator, or a zip_longest()."""
    for pair in gc.get_referrers(iterator):
        if type(pair) is tuple and any(type(one) is itertools.zip_longest for one in gc.get_referrers(pair)):
            return _LONGEST
        if type(pair) is tuple and any(type(one) is zip for one in gc.get_referrers(pair)):
            kinds = [type(one) for one in pair]
            found = (
                "range"
                if any(kind in _RANGES for kind in kinds)
                else "itertools.count"
                if itertools.count in kinds
                else ""
            )
            if found:
                return found
    return ""


def _waiting(frame: types.FrameType | None, around: list[Any]) -> tuple[Any, types.FrameType | None]:
    """The iterator that is this frame, and the frame that waits for it."""
    if frame is None:
        return None, None
    if frame.f_code.co_flags & 0x20:  # a generator's
        running = (one for one in around if type(one) is types.GeneratorType and one.gi_frame is frame)
        return next(running, None), frame.f_back
    if frame.f_code.co_name == "__next__" and frame.f_code.co_argcount:
        return frame.f_locals.get(frame.f_code.co_varnames[0]), frame.f_back
    return None, None


def _names(counters: list[Counter]) -> str:
    return " and ".join(dict.fromkeys(counter.kind for counter in counters))


def _line(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
