"""The small state of a rank as the bytes of a mailbox record, and back.

It is written at every step, so it must cost microseconds: what Python's `marshal` takes as it is goes to it
as it is (positions of loaders, generators' words, the state of schedulers), tensors follow as raw bytes, and
only what is neither is encoded as for a checkpoint. The document is made when a letter is read, which is
rare, and by a reader of our own (`formats.marshalled`): marshal's trusts its bytes.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lastcall import errors, memory
from lastcall.adapters.torch.data import position
from lastcall.adapters.torch.randomness import mersenne, rng
from lastcall.adapters.torch.state import encoding, objects, parts
from lastcall.adapters.torch.tensors import table
from lastcall.core.guard import mailbox
from lastcall.formats import marshalled, tree
from lastcall.types import TensorEntry

VERSION = 1
_LENGTH = struct.Struct("<Q")
_SCALARS = frozenset({type(None), bool, int, float, str})
_LARGE = 256 * 1024  # a value with more bytes of tensors is not mailed
_KINDS: dict[type, str] = {mersenne.PythonRaw: "python", mersenne.NumpyRaw: "numpy", mersenne.Words: "words"}

# group or number of the module, name, dtype code, shape, bytes
Row = tuple[Any, str, str, tuple[int, ...], int]


class Left(Exception):
    """A value that cannot be mailed, and why."""


class Letter:
    """A record that is being written."""

    def __init__(
        self, known: parts.PartLookup, place: tuple[int, bool, int], forms: dict[str, tuple[object, Row]]
    ) -> None:
        """`forms` is kept between letters: how generators are written, of which only the bytes change."""
        self._known = known
        self._forms = forms
        self._tensors: list[Row] = []
        self._buffers: list[Row] = []
        self._tensor_pieces: list[mailbox.Piece] = []
        self._buffer_pieces: list[mailbox.Piece] = []
        self._kept: list[object] = []  # whose memory the pieces are
        self._head: dict[str, Any] = {"version": VERSION, "place": place, "names": {}, "left": {}}

    def randomness(self, captured: rng.Captured) -> None:
        states = [state.numpy().tobytes() for state in (captured.torch, *captured.cuda)]
        self._head["randomness"] = (_twister(captured.python), _twister(captured.numpy), states)

    def loaders(self, positions: list[Any]) -> None:
        self._head["loaders"] = [_position(state) for state in positions]

    def name(self, name: str, copied: Any) -> None:
        """A value of protect() that holds no module and no optimizer, as tree.copy() gave it."""
        try:
            self._head["names"][name] = self._fragment(copied, name)
        except Left as left:
            self._head["left"][name] = str(left)

    def leave_out(self, name: str, because: str) -> None:
        self._head["left"][name] = because

    def buffer(
        self, module: int, name: str, tensor: torch.Tensor, entry: tuple[str, tuple[int, ...]]
    ) -> None:
        """A buffer of a module on the host. `module`: its number among the modules of the state."""
        nbytes = tensor.nbytes
        self._buffers.append((module, name, *entry, nbytes))
        self._buffer_pieces.append((tensor.data_ptr(), nbytes))
        self._kept.append(tensor)

    def pieces(self) -> list[mailbox.Piece]:
        """The bytes, in the order in which they are to be written."""
        self._head["tensors"], self._head["buffers"] = self._tensors, self._buffers
        head = marshal.dumps(self._head, marshalled.VERSION)
        return [_LENGTH.pack(len(head)), head, *self._tensor_pieces, *self._buffer_pieces]

    def _fragment(self, copied: Any, name: str) -> tuple[Any, ...]:
        if type(copied) in _SCALARS:
            return ("value", copied)
        if type(copied) is parts.Held:
            part, inside = copied
            if part.tag == "loader" and _native(inside):
                return ("loader", inside)
            if part.tag == "generator" and isinstance(inside, torch.Tensor):
                return ("document", self._generator(copied, name))
            if isinstance(part, objects.ObjectPart):
                if isinstance(part, objects.ScalerPart) and _on_device(inside):
                    raise Left("")  # the same on all ranks: it is moved by gradients that they have reduced
                state = part.thawed(inside)
                if _plain(state):
                    return ("object", type(part.value).__qualname__, state)
        return ("document", self._encoded(copied, name))

    def _generator(self, held: parts.Held, name: str) -> object:
        state: Any = held.copied
        known = self._forms.get(name)
        if known is None or known[1][4] != state.nbytes:
            before = len(self._tensors)
            document = self._encoded(held, name)
            if len(self._tensors) == before + 1:
                self._forms[name] = (document, self._tensors[-1])
            return document
        self._tensors.append(known[1])
        self._tensor_pieces.append((state.data_ptr(), state.nbytes))
        self._kept.append(state)
        return known[0]

    def _encoded(self, copied: Any, name: str) -> object:
        held = table.Shelf()
        document = encoding.Encoder(self._known, held, frozenset(), {}, unsaved={}).whole(copied, name)
        entries = [(group, entry) for group, rows in held.entries.items() for entry in rows.values()]
        if sum(entry.source.nbytes for _, entry in entries) > _LARGE:
            raise Left("it is too large for the last state of a rank")
        if not all(
            isinstance(entry.source, memory.HostMemory) and entry.share is None for _, entry in entries
        ):
            raise Left("its tensors are on a device, or not in one piece")
        for group, entry in entries:
            source: Any = entry.source
            self._tensors.append((group, entry.name, entry.dtype, tuple(entry.shape), source.nbytes))
            self._tensor_pieces.append((source.address, source.nbytes))
            self._kept.append(source)
        return document


class Received(NamedTuple):
    """A letter that was read."""

    place: tuple[int, bool, int]  # epoch, inside its batches, loops of it that ended
    randomness: dict[str, object]  # as in the document of a checkpoint
    loaders: list[object]
    names: dict[str, object]
    left: dict[str, str]  # names that were not mailed, and why
    tensors: dict[tuple[str, str], TensorEntry]  # by group and name
    # by the number of the module and the name in its state_dict()
    buffers: dict[tuple[int, str], TensorEntry]


def read(data: bytes) -> Received:
    """The letter of a record. CheckpointError where it is none: one of another release of lastcall."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        begin = _LENGTH.size + length
        head: Any = marshalled.loads(data[_LENGTH.size : begin])
        if head["version"] != VERSION:
            raise ValueError(f"it is of version {head['version']!r}")
        tensors: dict[Any, TensorEntry] = {}
        buffers: dict[Any, TensorEntry] = {}
        for into, rows in ((tensors, head["tensors"]), (buffers, head["buffers"])):
            for key, name, code, shape, nbytes in rows:
                into[key, name] = TensorEntry(
                    name, code, tuple(shape), memory.BytesSource(data[begin : begin + nbytes])
                )
                begin += nbytes
        names = {name: _DOCUMENTS[fragment[0]](*fragment[1:]) for name, fragment in head["names"].items()}
        loaders = [_DOCUMENTS[kind](state) for kind, state in head["loaders"]]
        return Received(
            head["place"], _randomness(head["randomness"]), loaders, names, head["left"], tensors, buffers
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, RuntimeError) as error:
        raise errors.CheckpointError(f"the last state of a rank cannot be read: {error!r:.200}") from error


def _encode(value: object) -> object:
    return tree.encode(value, "mail", tree.refuse)


# As the parts of `state/objects.py` write themselves into a document.
_DOCUMENTS: dict[str, Callable[..., object]] = {
    "document": lambda document: document,
    "value": _encode,
    "loader": lambda state: {tree.TAG: "loader", "v": _encode(state)},
    "object": lambda kind, state: {tree.TAG: "object", "class": kind, "v": _encode(state)},
}


def _position(state: Any) -> tuple[str, object]:
    """Our own positions are made of what marshal knows; those of other loaders may hold anything."""
    return ("value", state) if state is None or _native(state) else ("document", _encode(state))


def _native(state: Any) -> bool:
    return isinstance(state, dict) and state.get("kind") == position.KIND


def _on_device(copied: Any) -> bool:
    return isinstance(copied, tuple) and any(
        isinstance(item, torch.Tensor) and item.is_cuda for item in copied
    )


def _plain(value: Any, depth: int = 0) -> bool:
    """Whether marshal gives it back as it was. It would take an array or a bytearray, too, and give back
    bytes."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if depth > 8:
        return False
    if kind is dict:
        return all(type(key) is str for key in value) and all(
            _plain(item, depth + 1) for item in value.values()
        )
    return (kind is list or kind is tuple) and all(_plain(item, depth + 1) for item in value)


def _twister(state: Any) -> object:
    return (_KINDS[type(state)], *state) if type(state) in _KINDS else state


def _randomness(packed: tuple[Any, Any, list[bytes]]) -> dict[str, object]:
    python, numpy, states = packed
    tensors = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
    captured = rng.Captured(_untwisted(python), _untwisted(numpy), tensors[0], tuple(tensors[1:]))
    return rng.Randomness().to_document(captured)


def _untwisted(packed: Any) -> Any:
    kinds: dict[str, Any] = {name: kind for kind, name in _KINDS.items()}
    return kinds[packed[0]](*packed[1:]) if isinstance(packed, tuple) else packed
