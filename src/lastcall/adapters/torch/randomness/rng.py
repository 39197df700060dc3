"""The randomness of the process: python's `random`, numpy's global generator, torch's CPU and CUDA
generators.

It is copied at boundaries, so it must cost microseconds. The official getters of python and numpy build
tuples of 624 integers (11 to 70 µs); here the raw words of the generators are copied instead (0.6 µs each).
Where they lie in memory is found out once and proved against the official getters; where the proof fails,
those are used. Restoring is rare and uses the official setters only.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lastcall import errors
from lastcall.adapters.torch.randomness import changes, mersenne


class Captured(NamedTuple):
    """The randomness at one moment. Only bytes and numbers: nothing in it changes afterwards."""

    python: mersenne.PythonRaw | mersenne.Words
    # None: not imported; a dict: another generator
    numpy: mersenne.NumpyRaw | mersenne.Words | dict[str, object] | None
    torch: torch.Tensor
    cuda: tuple[torch.Tensor, ...] = ()


# Words of both twisters in one piece, python's spare number, torch's generators: a capture that was not
# requested yet.
Noted = tuple[bytes, float | None, torch.Tensor, tuple[torch.Tensor, ...]] | Captured
_join = b"".join
_on_device: Any = torch.cuda.is_initialized


class Randomness:
    """Copies and restores. One object a process; it holds nothing but where to look."""

    def __init__(self) -> None:
        self._python = mersenne.Python()
        self._numpy: mersenne.Numpy | None = None
        self._watched: changes.Watched | None = None
        # a mark, and the words and the state at it
        self._known: tuple[bytes, bytes, torch.Tensor] = (b"", b"", torch.empty(0))

    def note(self) -> Noted:
        """What captured() makes a capture of, should anybody ask. For every batch, and for the training
        thread alone. In the middle of a training step each call costs ten times what it costs alone: this has
        the fewest that will do."""
        watched = self._watched
        if watched is None or watched.numpy._rand._bit_generator is not watched.bits:
            return self._note_anew()
        mark = _join(watched.marks)
        known = self._known
        if known[0] != mark:
            known = self._known = (mark, _join(watched.words), torch.default_generator.get_state())
        cpu = known[2] if watched.knows_torch else torch.default_generator.get_state()
        return (known[1], watched.python.gauss_next, cpu, _cuda() if _on_device() else ())

    def _note_anew(self) -> Captured:
        captured = self.capture()
        self._watched, self._known = changes.watch(self._python, self._numpy), (b"", b"", captured.torch)
        return captured

    def captured(self, noted: Noted) -> Captured:
        if isinstance(noted, Captured):
            return noted
        words, gauss, cpu, cuda = noted
        return Captured(*mersenne.apart(words, gauss), cpu, cuda)

    def capture(self) -> Captured:
        """What the generators would give next. No device is waited for: a CUDA generator's state is on the
        host."""
        numpy = None
        if "numpy" in sys.modules:
            if self._numpy is None:
                self._numpy = mersenne.Numpy()
            numpy = self._numpy.read()
        cuda = _cuda() if _on_device() else ()
        return Captured(self._python.read(), numpy, torch.default_generator.get_state(), cuda)

    def restore(self, captured: Captured) -> None:
        random.setstate(_python_state(_words(captured.python)))
        if captured.numpy is not None:
            mersenne.set_numpy(captured.numpy if isinstance(captured.numpy, dict) else _words(captured.numpy))
        torch.default_generator.set_state(captured.torch)
        if captured.cuda and torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
            for generator, state in zip(torch.cuda.default_generators, captured.cuda, strict=False):
                generator.set_state(state)

    def forked(self, captured: Captured, rank: int) -> Captured:
        """Randomness for a rank that the saved run did not have: made from another's, and unlike that of any
        other rank."""
        told = json.dumps([self.to_document(captured), rank], sort_keys=True).encode()
        seed = int.from_bytes(hashlib.sha256(told).digest()[:8], "little")
        _, words, _ = random.Random(seed).getstate()
        return Captured(
            mersenne.Words(struct.pack("=624I", *words[:624]), words[624], None),
            None if captured.numpy is None else mersenne.seeded(captured.numpy, seed),
            torch.Generator().manual_seed(seed).get_state(),
            tuple(_bytes_in(struct.pack("<QQ", seed ^ device, 0)) for device in range(len(captured.cuda))),
        )

    def to_document(self, captured: Captured) -> dict[str, object]:
        numpy = captured.numpy
        return {
            "python": _words_out(_words(captured.python)),
            "numpy": numpy if isinstance(numpy, dict) or numpy is None else _words_out(_words(numpy)),
            "torch": _tensor_out(captured.torch),
            "cuda": [_tensor_out(state) for state in captured.cuda],
        }

    def from_document(self, document: object) -> Captured:
        """What to_document() was given. Sizes are checked: setters of generators are not made for hostile
        bytes."""
        try:
            return _from_document(document)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            if isinstance(error, errors.LastcallError):
                raise
            raise errors.CheckpointError(f"the saved randomness is damaged: {error!r}") from error


def _cuda() -> tuple[torch.Tensor, ...]:
    return tuple(generator.get_state() for generator in torch.cuda.default_generators)


def _from_document(document: Any) -> Captured:
    numpy = document["numpy"]
    if isinstance(numpy, Mapping):
        numpy = _words_in(numpy) if "key" in numpy else mersenne.checked(dict(numpy))
    elif numpy is not None:
        raise errors.CheckpointError(
            f"the saved randomness of numpy is a {type(numpy).__name__}: it is damaged"
        )
    size = torch.default_generator.get_state().nbytes
    return Captured(
        _words_in(document["python"]),
        numpy,
        _tensor_in(document["torch"], size),
        tuple(_tensor_in(state, 16) for state in document["cuda"]),
    )


def _python_state(words: mersenne.Words) -> tuple[int, tuple[int, ...], float | None]:
    return 3, (*struct.unpack("=624I", words.key), words.pos), words.gauss


def _words(state: mersenne.PythonRaw | mersenne.NumpyRaw | mersenne.Words) -> mersenne.Words:
    return state if isinstance(state, mersenne.Words) else state.words()


def _words_out(words: mersenne.Words) -> dict[str, object]:
    little = struct.pack("<624I", *struct.unpack("=624I", words.key))
    return {"key": base64.b64encode(little).decode("ascii"), "pos": words.pos, "gauss": words.gauss}


def _words_in(document: Any) -> mersenne.Words:
    key = base64.b64decode(document["key"], validate=True)
    pos, gauss = document["pos"], document["gauss"]
    if (
        len(key) != 2496
        or type(pos) is not int
        or not 0 <= pos <= 624
        or type(gauss) not in (float, type(None))
    ):
        raise errors.CheckpointError(
            "the saved state of a Mersenne twister is damaged: a size or a position is wrong"
        )
    return mersenne.Words(struct.pack("=624I", *struct.unpack("<624I", key)), pos, gauss)


def _tensor_out(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode("ascii")


def _tensor_in(text: Any, nbytes: int) -> torch.Tensor:
    data = base64.b64decode(text, validate=True)
    if len(data) != nbytes:
        raise errors.CheckpointError(
            f"the saved state of a torch generator has {len(data)} bytes instead of {nbytes}"
        )
    return _bytes_in(data)


def _bytes_in(data: bytes) -> torch.Tensor:
    state = torch.empty(len(data), dtype=torch.uint8)
    ctypes.memmove(state.data_ptr(), data, len(data))
    return state


def official(captured: Captured) -> dict[str, Any]:
    """The randomness in the forms that the official setters take; `cuda` is a list, one for each device,
    where there are any."""
    found: dict[str, Any] = {"python": _python_state(_words(captured.python)), "cpu": captured.torch}
    if captured.numpy is not None:
        found["numpy"] = mersenne.numpy_state(
            captured.numpy if isinstance(captured.numpy, dict) else _words(captured.numpy)
        )
    if captured.cuda:
        found["cuda"] = list(captured.cuda)
    return found
