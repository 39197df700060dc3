"""Files made to do harm. Each one must be refused with an error that says what is wrong, and where."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from lastcall.errors import CheckpointError
from lastcall.formats import safetensors


def file(header: bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def tensors(nbytes: int, **named: object) -> bytes:
    return file(json.dumps(named).encode(), bytes(nbytes))


def refuse(content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        safetensors.parse(content, len(content))


FRAMES = {
    "nothing": (b"", "truncated after 0 bytes"),
    "less than a length": (b"1234567", "truncated after 7 bytes"),
    "length zero": (file(b""), r"empty \(length 0\)"),
    "length past the end": (file(b"{}", length=3), "claims 3 bytes, but the file has only 2"),
    "length of 2**64 - 1": (file(b"{}", length=2**64 - 1), "claims 18446744073709551615 bytes, more than"),
    "giant length": (file(b"{}", length=100_000_001), "claims 100000001 bytes, more than the 100000000"),
    "not utf-8": (file(b'{"\xff":1}'), "not UTF-8: byte 0xff at 2"),
    "utf-16": (file('{"a":1}'.encode("utf-16-le")), "not JSON"),
    "byte order mark": (file(b"\xef\xbb\xbf{}"), "does not start with '{'"),
    "leading space": (file(b" {}"), "does not start with '{'"),
    "a list": (file(b"[]"), "does not start with '{'"),
    "cut off": (file(b'{"a":{"dtype"'), "not JSON"),
    "two documents": (file(b"{}{}"), "not JSON: Extra data"),
    "a raw control character": (file(b'{"a\x01":1}'), "not JSON"),
    "deep lists": (file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "deep objects": (file(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "a tensor twice": (
        file(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
        ),
        "names 'a' twice",
    ),
    "a name twice by escapes": (file(b'{"a":1,"\\u0061":2}'), "names 'a' twice"),
    "a field twice": (
        file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"shape":[1]}}', b"1"),
        "names 'shape' twice",
    ),
    "metadata twice": (file(b'{"__metadata__":{},"__metadata__":{}}'), "names '__metadata__' twice"),
    "a lone surrogate as a name": (
        file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "name is not valid Unicode",
    ),
    "infinity": (
        file(b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,0]}}'),
        "'a': shape .* not inf",
    ),
    "minus zero": (file(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), "'a': shape .* not -0.0"),
    "thousands of digits": (
        file(b'{"a":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,0]}}'),
        "'a': shape .* not inf",
    ),
}


@pytest.mark.parametrize("attack", FRAMES)
def test_a_file_with_a_broken_frame_is_refused(attack: str) -> None:
    refuse(*FRAMES[attack])


HEADERS = {
    "a tensor that is a number": (tensors(4, a=1), "'a': expected an object with dtype"),
    "a tensor that is null": (tensors(4, a=None), "'a': expected an object"),
    "a tensor that is a list": (tensors(4, a=["F32", [1], [0, 4]]), "'a': expected an object"),
    "no dtype": (tensors(4, a={"shape": [1], "data_offsets": [0, 4]}), "'a': expected an object"),
    "an unknown field": (tensors(4, a=tensor() | {"__class__": "os.system"}), "'a': expected an object"),
    "an unknown dtype": (tensors(4, a=tensor(dtype="F33")), "'a': unknown dtype 'F33'"),
    "a dtype of sub-byte elements": (tensors(4, a=tensor("F4", [8])), "'a': unknown dtype 'F4'"),
    "a dtype in lower case": (tensors(4, a=tensor(dtype="f32")), "'a': unknown dtype 'f32'"),
    "a dtype that is a list": (tensors(4, a=tensor(dtype=["F32"])), r"'a': unknown dtype \['F32'\]"),
    "a dtype that is null": (tensors(4, a=tensor(dtype=None)), "'a': unknown dtype None"),
    "a shape that is a number": (tensors(4, a=tensor(shape=1)), "'a': shape must be a list, not 1"),
    "a shape that is a string": (tensors(4, a=tensor(shape="1")), "'a': shape must be a list, not '1'"),
    "a shape that is an object": (tensors(4, a=tensor(shape={"0": 1})), "'a': shape must be a list"),
    "a boolean in a shape": (tensors(4, a=tensor(shape=[True])), "'a': shape must hold integers .* not True"),
    "a float in a shape": (tensors(4, a=tensor(shape=[1.0])), r"'a': shape must hold integers .* not 1\.0"),
    "a string in a shape": (tensors(4, a=tensor(shape=["1"])), "'a': shape must hold integers .* not '1'"),
    "a list in a shape": (tensors(4, a=tensor(shape=[[1]])), r"'a': shape must hold integers .* not \[1\]"),
    "null in a shape": (tensors(4, a=tensor(shape=[None])), "'a': shape must hold integers .* not None"),
    "a negative dimension": (tensors(4, a=tensor(shape=[-1])), "'a': shape must hold integers .* not -1"),
    "two negative dimensions": (
        tensors(4, a=tensor(shape=[-1, -1])),
        "'a': shape must hold integers .* not -1",
    ),
    "a dimension of 2**63": (tensors(4, a=tensor(shape=[2**63])), "'a': shape .* not 9223372036854775808"),
    "a product of 2**64": (
        tensors(0, a=tensor(shape=[2**32, 2**32], offsets=[0, 0])),
        "'a': the product .* overflows",
    ),
    "a product that wraps to 1": (tensors(4, a=tensor(shape=[2**62, 4, 1])), "'a': the product .* overflows"),
    "an overflow hidden by zero": (
        tensors(0, a=tensor(shape=[0, 2**62, 2**62], offsets=[0, 0])),
        "'a': the product .* overflows",
    ),
    "one offset": (tensors(4, a=tensor(offsets=[0])), r"'a': data_offsets must be two numbers, not \(0,\)"),
    "three offsets": (tensors(4, a=tensor(offsets=[0, 4, 8])), "'a': data_offsets must be two numbers"),
    "offsets that are null": (
        tensors(4, a=tensor(offsets=None)),
        "'a': data_offsets must be a list, not None",
    ),
    "boolean offsets": (
        tensors(1, a=tensor("U8", [1], [False, True])),
        "'a': data_offsets must hold .* not False",
    ),
    "a negative offset": (tensors(4, a=tensor(offsets=[-4, 0])), "'a': data_offsets must hold .* not -4"),
    "a float offset": (tensors(4, a=tensor(offsets=[0, 4.0])), r"'a': data_offsets must hold .* not 4\.0"),
    "a huge offset": (
        tensors(4, a=tensor(offsets=[0, 10**30])),
        "'a': data_offsets must hold .* not 1000000",
    ),
    "reversed offsets": (tensors(4, a=tensor(offsets=[4, 0])), r"'a': data_offsets are reversed: \(4, 0\)"),
    "an end out of range": (
        tensors(4, a=tensor(shape=[2], offsets=[0, 8])),
        "'a': .* out of range, the data has 4",
    ),
    "both out of range": (
        tensors(0, a=tensor(offsets=[2**40, 2**40 + 4])),
        "'a': .* out of range, the data has 0",
    ),
    "fewer bytes than the shape": (
        tensors(4, a=tensor(shape=[2])),
        r"'a': .* hold 4 bytes, but F32 .* takes "
        r"8",
    ),
    "more bytes than the shape": (
        tensors(8, a=tensor(offsets=[0, 8])),
        r"'a': .* hold 8 bytes, but F32 .* "
        r"takes 4",
    ),
    "bytes for an empty tensor": (
        tensors(4, a=tensor(shape=[0])),
        r"'a': .* hold 4 bytes, but F32 .* takes "
        r"0",
    ),
    "one range for two tensors": (tensors(4, a=tensor(), b=tensor()), "'b': begins at byte .* overlaps"),
    "ranges that overlap": (
        tensors(6, a=tensor("U8", [4], [0, 4]), b=tensor("U8", [4], [2, 6])),
        "'b': begins at byte .* overlaps",
    ),
    "a range inside another": (
        tensors(8, a=tensor("U8", [8], [0, 8]), b=tensor("U8", [2], [2, 4])),
        "'b': begins at byte .* overlaps",
    ),
    "an empty tensor inside another": (
        tensors(4, a=tensor(), b=tensor("U8", [0], [2, 2])),
        "'b': begins at byte .* overlaps",
    ),
    "a hole at the start": (tensors(8, a=tensor(offsets=[4, 8])), "'a': begins at byte .* leaves a gap"),
    "a hole between": (
        tensors(12, a=tensor(), b=tensor(offsets=[8, 12])),
        "'b': begins at byte .* leaves a gap",
    ),
    "bytes at the end": (tensors(7, a=tensor()), "3 belong to none"),
    "bytes without tensors": (tensors(7), "7 belong to none"),
    "metadata that is null": (
        tensors(0, __metadata__=None),
        "__metadata__ must map strings to strings, not be None",
    ),
    "metadata that is a list": (
        tensors(0, __metadata__=["a"]),
        "__metadata__ must map strings .* not be \\['a'\\]",
    ),
    "a number in metadata": (tensors(0, __metadata__={"a": 1}), "__metadata__ must map .* but 'a' is 1"),
    "an object in metadata": (tensors(0, __metadata__={"a": {}}), "__metadata__ must map .* but 'a' is {}"),
    "a surrogate in metadata": (
        tensors(0, __metadata__={"a": "\udfff"}),
        "__metadata__ must map .* but 'a' is",
    ),
    "a tensor as metadata": (tensors(4, __metadata__=tensor()), "__metadata__ must map .* but 'shape' is"),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_a_header_that_lies_is_refused(attack: str) -> None:
    refuse(*HEADERS[attack])


def test_the_honest_twin_of_these_files_is_accepted() -> None:
    content = tensors(9, __metadata__={"k": "v"}, a=tensor(offsets=[0, 4]), b=tensor("U8", [5], [4, 9]))
    start = len(content) - 9
    assert safetensors.parse(content, len(content)) == (
        {
            "a": safetensors.Stored("F32", (1,), start, start + 4),
            "b": safetensors.Stored("U8", (5,), start + 4, start + 9),
        },
        {"k": "v"},
    )


def test_a_file_shorter_than_its_tensors_is_refused() -> None:
    content = tensors(4, a=tensor())
    with pytest.raises(CheckpointError, match=r"'a': .* out of range, the data has 3"):
        safetensors.parse(content, len(content) - 1)


def test_a_header_shorter_than_it_says_is_refused() -> None:
    content = tensors(4, a=tensor())
    with pytest.raises(CheckpointError, match="truncated: 2 of"):
        safetensors.parse(content[:10], len(content))


def test_an_error_about_a_giant_value_is_short() -> None:
    with pytest.raises(CheckpointError) as caught:
        content = tensors(4, **{"n" * 100_000: tensor(shape=[*range(1, 10_000), "x" * 100_000])})
        safetensors.parse(content, len(content))
    assert len(str(caught.value)) < 300


def test_an_attack_is_refused_from_disk_too(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(tensors(4, a=tensor(shape=[2])))
    with pytest.raises(CheckpointError, match="'a'"):
        safetensors.parse(safetensors.read_header(path), path.stat().st_size)
