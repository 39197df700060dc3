"""The Mersenne twisters of `random` and of numpy, read as raw words in memory. What rng.py is fast with."""

from __future__ import annotations

import ctypes
import functools
import logging
import random
import struct
import sys
import sysconfig
from typing import Any, NamedTuple

from lastcall import errors

log = logging.getLogger("lastcall")

# of CPython, with its lock: the layouts of objects are its own, and on another Python id() is no address
TESTED = ((3, 11), (3, 12), (3, 13), (3, 14))
_NOT_FOUND = "its words are not where they are in the interpreters that lastcall was tested with"
_HEAD = object.__basicsize__  # where the fields of a C object start
_SIZE = 2500  # 624 words and a position
_ORDER: Any = "little" if struct.pack("=I", 1)[0] else "big"
_SPARE = struct.Struct("=ixxxxd")  # int has_gauss; double gauss; with the padding a C compiler puts between


class Words(NamedTuple):
    """The state of a Mersenne twister: 624 words in native order, the position in them, and the spare normal
    number."""

    key: bytes
    pos: int
    gauss: float | None


class PythonRaw(NamedTuple):
    """`{int index; uint32 state[624]}` and the spare number, as read: taken apart only when it is saved."""

    raw: bytes
    gauss: float | None

    def words(self) -> Words:
        return Words(self.raw[4:], int.from_bytes(self.raw[:4], _ORDER), self.gauss)


class NumpyRaw(NamedTuple):
    """`{uint32 key[624]; int pos}` and `{int has_gauss; double gauss}`, as read."""

    raw: bytes
    spare: bytes

    def words(self) -> Words:
        has, gauss = _SPARE.unpack(self.spare)
        return Words(self.raw[:2496], int.from_bytes(self.raw[2496:], _ORDER), gauss if has else None)


def untested() -> str:
    """What this Python is, where lastcall was not tested with it; nothing is read from its memory then."""
    kind, version = sys.implementation.name, sys.version_info[:2]
    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    if kind == "cpython" and version in TESTED and not free:
        return ""
    return f"{kind} {version[0]}.{version[1]}{' without its lock' if free else ''}"


@functools.cache
def _explain(whose: str, because: str) -> None:
    """Once a process."""
    log.info(
        "The random state of %s is copied by its official getter, which takes up to 70 µs each time: %s",
        whose,
        because,
    )


def at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))


class Python:
    """python's `random`. Its object is a head, an index and the words; that is proved, not believed."""

    def __init__(self) -> None:
        self.instance: Any = getattr(random, "_inst", None)
        self.view: memoryview | None = None
        if this := untested():
            _explain("python", f"lastcall was not tested with {this}")
            return
        if self.instance is not None and type(self.instance).__basicsize__ >= _HEAD + _SIZE:
            self.view = at(id(self.instance) + _HEAD, _SIZE)
            if self.read() != _official_python():
                self.view = None
        if self.view is None:
            _explain("python", _NOT_FOUND)

    def read(self) -> PythonRaw:
        if self.view is None:
            return _official_python()
        return PythonRaw(self.view.tobytes(), self.instance.gauss_next)


def _official_python() -> PythonRaw:
    _, state, gauss = random.getstate()
    return PythonRaw(struct.pack("=i624I", state[624], *state[:624]), gauss)


class Numpy:
    """numpy's global RandomState. The words have an official address; the spare normal number of the legacy
    functions lies inside the RandomState object, at a place found with the help of a private one whose spare
    number we choose."""

    def __init__(self) -> None:
        import numpy as np

        self._np = np
        self.mtrand: Any = np.random.mtrand
        self.generator: Any = None
        self.view: memoryview | None = None
        this = untested()
        self._offset = 0 if this else _find_spare(np)
        if not self._offset:
            _explain("numpy", f"lastcall was not tested with {this}" if this else _NOT_FOUND)
        self.spare = memoryview(b"")

    def read(self) -> NumpyRaw | dict[str, object]:
        state = self.mtrand._rand
        # np.random.set_bit_generator() may exchange it at any time
        if state._bit_generator is not self.generator:
            self._attach(state)
        if self.view is None:
            return _official_numpy(self._np)
        return NumpyRaw(self.view.tobytes(), self.spare.tobytes())

    def _attach(self, state: Any) -> None:
        generator = self.generator = state._bit_generator
        self.view = None
        plain = type(state) is self._np.random.RandomState and type(generator).__name__ == "MT19937"
        if not plain or not self._offset:
            return
        self.view = at(int(generator.ctypes.state_address), _SIZE)
        self.spare = at(id(state) + self._offset, _SPARE.size)
        official = _official_numpy(self._np)
        if (
            not isinstance(official, NumpyRaw)
            or NumpyRaw(self.view.tobytes(), self.spare.tobytes()).words() != official.words()
        ):
            self.view = None
            _explain("numpy", _NOT_FOUND)


def apart(words: bytes, gauss: float | None) -> tuple[PythonRaw, NumpyRaw]:
    """The words of python's, of numpy's, and numpy's spare number, which were copied in one piece."""
    return PythonRaw(words[:_SIZE], gauss), NumpyRaw(words[_SIZE : 2 * _SIZE], words[2 * _SIZE :])


def _find_spare(np: Any) -> int:
    """Where a RandomState keeps its spare normal number, or 0. Two different numbers must turn up at the same
    place."""
    found = []
    for gauss in (1.2345678901e-101, -9.87654321e102):
        private = np.random.RandomState(0)
        private.set_state(("MT19937", private.get_state()[1], 5, 1, gauss))
        memory = ctypes.string_at(id(private), type(private).__basicsize__)
        found.append(memory.find(_SPARE.pack(1, gauss)[8:]) - 8)
        if found[-1] < _HEAD or _SPARE.unpack(memory[found[-1] : found[-1] + _SPARE.size]) != (1, gauss):
            return 0
    return found[0] if found[0] == found[1] else 0


def _official_numpy(np: Any) -> NumpyRaw | dict[str, object]:
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return {name: _plain(np, value) for name, value in state.items()}
    inner = state["state"]
    raw = inner["key"].astype("=u4").tobytes() + struct.pack("=i", int(inner["pos"]))
    return NumpyRaw(raw, _SPARE.pack(int(state["has_gauss"]), float(state["gauss"])))


def numpy_state(captured: Words | dict[str, object]) -> Any:
    """The state in the form that np.random.set_state() takes."""
    import numpy as np

    if isinstance(captured, Words):
        key = np.frombuffer(captured.key, dtype="=u4")
        return "MT19937", key, captured.pos, int(captured.gauss is not None), captured.gauss or 0.0
    return {name: _unplain(np, value) for name, value in captured.items()}


def set_numpy(captured: Words | dict[str, object]) -> None:
    """Give numpy's global generator a state. It must be of the kind that the state was taken from."""
    import numpy as np

    state = numpy_state(captured)
    try:
        np.random.set_state(state)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise errors.MismatchError(
            f"numpy's global generator does not take the saved state ({error}): the checkpoint was made with "
            "another "
            "bit generator. Call np.random.set_bit_generator() with the same one before protect()."
        ) from error


def seeded(like: NumpyRaw | Words | dict[str, object], seed: int) -> Words | dict[str, object]:
    """The state of a generator of the same kind, made from a seed. One of a kind that numpy does not have
    stays as it is."""
    import numpy as np

    if isinstance(like, dict):
        kind = like.get("bit_generator")
        made = (
            getattr(np.random, kind) if kind in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64") else None
        )
        return like if made is None else {name: _plain(np, value) for name, value in made(seed).state.items()}
    _, key, pos, _, _ = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).get_state(legacy=True)
    return Words(np.asarray(key, dtype="=u4").tobytes(), int(pos), None)


def _plain(np: Any, value: object) -> object:
    """JSON for what bit generators keep: arrays become {"array", "dtype"}, integers of any size hexadecimal
    text."""
    if isinstance(value, dict):
        return {name: _plain(np, item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": [int(item) for item in value.tolist()], "dtype": value.dtype.str}
    return {"hex": hex(value)} if type(value) is int else value


def _unplain(np: Any, value: object) -> object:
    if not isinstance(value, dict):
        return value
    if "hex" in value:
        return int(value["hex"], 16)
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    return {name: _unplain(np, item) for name, item in value.items()}


def checked(state: dict[str, object]) -> dict[str, object]:
    """A state that set_numpy() may be given, or CheckpointError: only names, numbers and arrays of
    integers."""
    import numpy as np

    def walk(value: object, depth: int) -> None:
        if depth > 4 or not isinstance(value, (dict, str, int, float)):
            raise errors.CheckpointError(
                "the saved randomness of numpy holds something that no generator keeps"
            )
        if isinstance(value, dict) and "array" in value:
            dtype, items = value.get("dtype"), value["array"]
            if dtype not in ("<u4", "<u8", "<i8") or not isinstance(items, list) or len(items) > 4096:
                raise errors.CheckpointError(
                    "the saved randomness of numpy holds an array that no generator keeps"
                )
            np.array(items, dtype=dtype)
        elif isinstance(value, dict) and "hex" in value:
            int(str(value["hex"]), 16)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item, depth + 1)

    walk(state, 0)
    return state
