from __future__ import annotations

import contextlib
import math
import struct

import safetensors as library
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import torch as library_torch

from lastcall.errors import CheckpointError
from lastcall.formats import layouts, safetensors
from lastcall.memory import BytesSource
from lastcall.types import TensorEntry

Drawn = dict[str, tuple[str, tuple[int, ...], bytes]]
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
metadata = st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Drawn:
    drawn = {}
    for name in draw(st.lists(names, max_size=6, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(safetensors.DTYPES))), draw(shapes)
        nbytes = math.prod(shape) * safetensors.DTYPES[dtype]
        drawn[name] = (dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes)))
    return drawn


def build(drawn: Drawn, about: dict[str, str] | None = None) -> bytes:
    entries = [
        TensorEntry(name, dtype, shape, BytesSource(data)) for name, (dtype, shape, data) in drawn.items()
    ]
    return layouts.materialize(safetensors.layout("file", entries, about))


@given(tensors(), metadata)
def test_the_library_reads_what_was_laid_out(drawn: Drawn, about: dict[str, str]) -> None:
    read = {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
        for name, info in library.deserialize(build(drawn, about))
    }
    assert read == drawn


@given(tensors(), metadata)
def test_what_was_laid_out_is_parsed_back(drawn: Drawn, about: dict[str, str]) -> None:
    content = build(drawn, about)
    parsed, found = safetensors.parse(content, len(content))
    read = {name: (info.dtype, info.shape, content[info.begin : info.end]) for name, info in parsed.items()}
    assert (read, found) == (drawn, about)


TORCH = {
    "F32": torch.float32,
    "I64": torch.int64,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def as_torch(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    flat = torch.tensor(list(data), dtype=torch.uint8)
    return flat.view(TORCH[dtype]).reshape(shape) if data else torch.empty(shape, dtype=TORCH[dtype])


@given(tensors(), metadata)
def test_what_the_library_wrote_is_parsed(drawn: Drawn, about: dict[str, str]) -> None:
    known = {name: value for name, value in drawn.items() if value[0] in TORCH}
    content = library_torch.save({name: as_torch(*value) for name, value in known.items()}, about or None)
    parsed, found = safetensors.parse(content, len(content))
    read = {name: (info.dtype, info.shape, content[info.begin : info.end]) for name, info in parsed.items()}
    assert (read, found) == (known, about)


SAMPLE = {"a": ("F32", (2, 3), bytes(24)), "b": ("U8", (5,), b"12345"), "c": ("I64", (), bytes(8))}
COMPACT = build(SAMPLE, {"k": "v"})
COMPACT = struct.pack("<Q", len(COMPACT[8:4096].rstrip(b" "))) + COMPACT[8:4096].rstrip(b" ") + COMPACT[4096:]
HEADER_END = 8 + struct.unpack_from("<Q", COMPACT)[0]
mutations = st.lists(
    st.tuples(
        st.integers(0, HEADER_END - 1),
        st.sampled_from([0, 1, 2]),
        st.one_of(
            st.binary(max_size=3),
            st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"1", b"e9", b"0", b" "]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@given(mutations)
def test_a_mutated_header_is_refused_cleanly_or_is_one_that_the_library_reads_alike(
    changes: list[tuple[int, int, bytes]],
) -> None:
    content = bytearray(COMPACT)
    for place, removed, inserted in changes:
        content[place : place + removed] = inserted
    try:
        parsed, _ = safetensors.parse(bytes(content), len(content))
    except CheckpointError:
        return
    theirs = {
        name: (info["dtype"], info["shape"], info["data"])
        for name, info in library.deserialize(bytes(content))
    }
    ours = {
        name: (info.dtype, list(info.shape), content[info.begin : info.end]) for name, info in parsed.items()
    }
    assert ours == theirs


@given(st.binary(max_size=200), st.integers(0, 300))
def test_random_bytes_are_refused_cleanly(content: bytes, file_size: int) -> None:
    framed = struct.pack("<Q", len(content)) + content
    for candidate in (content, framed, struct.pack("<Q", len(content) + 1) + b"{" + content):
        with contextlib.suppress(CheckpointError):
            safetensors.parse(candidate, file_size)
