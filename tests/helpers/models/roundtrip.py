"""Captures and restores without files: every source is copied to bytes, every target from them."""

from __future__ import annotations

import ctypes
import json
from typing import Any

from lastcall import types
from lastcall.adapters.torch.state.entries import Loading, StateSet
from lastcall.formats.safetensors import Stored


def read(source: types.Source, piece: int = 1 << 20) -> bytes:
    """The bytes of a source, asked for in pieces."""
    data = bytearray(source.nbytes)
    view = (ctypes.c_char * max(1, source.nbytes)).from_buffer(data) if data else None
    for offset in range(0, source.nbytes, piece):
        length = min(piece, source.nbytes - offset)
        source.read_into(ctypes.addressof(view) + offset, offset, length)
    del view
    return bytes(data)


def write(target: types.Target, data: bytes, piece: int = 1 << 20) -> None:
    assert target.nbytes == len(data)
    buffer = ctypes.create_string_buffer(data, max(1, len(data)))
    for offset in range(0, len(data), piece):
        target.write_from(ctypes.addressof(buffer) + offset, offset, min(piece, len(data) - offset))


class Saved:
    """A checkpoint in memory."""

    def __init__(self, state: StateSet, small: object = None, grads: bool = False) -> None:
        document, groups = state.capture(small)
        if grads and (group := state.gradients()) is not None:
            groups += (group,)
        self.text = json.dumps(document, allow_nan=False)
        self.groups = groups
        self.data = {
            group.name: {entry.name: read(entry.source) for entry in group.entries} for group in groups
        }
        self.stored = {
            group.name: {
                entry.name: Stored(entry.dtype, entry.shape, 0, entry.source.nbytes)
                for entry in group.entries
            }
            for group in groups
        }

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.text)

    def restore(self, state: StateSet, *, lenient: bool = False) -> Loading:
        loading = state.prepare(self.document, self.stored, lenient=lenient)
        for group, targets in loading.targets.items():
            for name, target in targets.items():
                write(target, self.data[group][name])
        loading.finish()
        return loading

    def names(self, group: str) -> list[str]:
        return sorted(self.data.get(group, {}))


class FakeTracker:
    def __init__(self, position: int) -> None:
        self.position = position

    def state(self) -> dict[str, object]:
        return {"position": self.position, "seeds": (1, 2)}

    def load(self, state: dict[str, object]) -> None:
        assert state["seeds"] == (1, 2)
        self.position = state["position"]  # type: ignore[assignment]
