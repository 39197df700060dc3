from __future__ import annotations

import json
import math
import os
import socket
import struct
from pathlib import Path

import pytest
import safetensors as library
import torch
from safetensors import torch as library_torch

from lastcall.errors import CheckpointError
from lastcall.formats import layouts, safetensors
from lastcall.memory import BytesSource
from lastcall.types import TensorEntry


def entry(name: str, dtype: str, shape: tuple[int, ...], fill: int = 1) -> TensorEntry:
    return TensorEntry(
        name, dtype, shape, BytesSource(bytes([fill]) * math.prod(shape) * safetensors.DTYPES[dtype])
    )


def write(path: Path, *entries: TensorEntry, metadata: dict[str, str] | None = None) -> Path:
    path.write_bytes(layouts.materialize(safetensors.layout(path.name, entries, metadata)))
    return path


@pytest.mark.parametrize("dtype", sorted(safetensors.DTYPES))
def test_the_library_loads_every_dtype_with_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "a.safetensors", entry("x", dtype, (3, 2)))
    tensor = library_torch.load_file(path)["x"]
    assert tuple(tensor.shape) == (3, 2)
    assert tensor.element_size() == safetensors.DTYPES[dtype]
    assert tensor.view(torch.uint8).flatten().tolist() == [1] * 6 * safetensors.DTYPES[dtype]


def test_scalars_and_empty_tensors_load(tmp_path: Path) -> None:
    one = TensorEntry("scalar", "F32", (), BytesSource(struct.pack("<f", 2.5)))
    path = write(tmp_path / "a.safetensors", entry("none", "F64", (0, 5)), one, entry("void", "U8", (0,)))
    loaded = library_torch.load_file(path)
    assert loaded["scalar"].shape == () and loaded["scalar"].item() == 2.5
    assert loaded["none"].shape == (0, 5) and loaded["void"].shape == (0,)


def test_a_file_without_tensors_loads(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors")
    assert library_torch.load_file(path) == {}
    assert safetensors.parse(safetensors.read_header(path), path.stat().st_size) == ({}, {})


def test_metadata_reaches_the_library(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.safetensors", entry("x", "U8", (1,)), metadata={"format": "pt", "\u6a21": "\u2713"}
    )
    with library.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "\u6a21": "\u2713"}


def test_data_begins_on_its_phase_and_each_tensor_is_aligned_and_in_the_given_order_within_its_size() -> None:
    given = [
        entry("b1", "BOOL", (3,)),
        entry("f1", "F32", (1,)),
        entry("h", "BF16", (5,)),
        entry("d", "F64", (1,)),
    ]
    layout = safetensors.layout("a", [*given, entry("f0", "I32", (1,)), entry("b0", "U8", (2,))])
    header = layout.extents[0].source
    assert isinstance(header, BytesSource)
    assert header.nbytes % 4096 == safetensors.PHASE
    tensors, _ = safetensors.parse(header.data, layout.size)
    assert sorted(tensors, key=lambda name: tensors[name].begin) == ["d", "f1", "f0", "h", "b1", "b0"]
    assert all(stored.begin % safetensors.DTYPES[stored.dtype] == 0 for stored in tensors.values())


def test_tensors_of_whole_sectors_come_first_so_that_they_share_a_phase() -> None:
    layout = safetensors.layout(
        "a", [entry("odd", "F64", (3,)), entry("whole", "F32", (128,)), entry("bytes", "U8", (1024,))]
    )
    header = layout.extents[0].source
    assert isinstance(header, BytesSource)
    tensors, _ = safetensors.parse(header.data, layout.size)
    assert sorted(tensors, key=lambda name: tensors[name].begin) == ["whole", "bytes", "odd"]
    assert tensors["whole"].begin % 512 == tensors["bytes"].begin % 512 == safetensors.PHASE


@pytest.mark.parametrize("length", [4000, 4001, 4030, 4040, 4087, 8000])
def test_the_header_ends_on_its_phase_whatever_its_length(length: int) -> None:
    layout = safetensors.layout("a", [entry("n" * length, "U8", (1,))])
    assert (layout.size - 1) % 4096 == safetensors.PHASE
    assert list(safetensors.parse(layouts.materialize(layout), layout.size)[0]) == ["n" * length]


def test_names_may_hold_quotes_newlines_and_any_script(tmp_path: Path) -> None:
    name = 'a"b\\c\n\x00\u2028\u6a21\u578b\U0001f642'
    path = write(tmp_path / "a.safetensors", entry(name, "U8", (1,)))
    assert list(library_torch.load_file(path)) == [name]


@pytest.mark.parametrize("name", ["x", "__metadata__"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is taken"):
        safetensors.layout("a", [entry("x", "U8", (1,)), entry(name, "F32", (1,))])


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'x' has dtype 'C128'"):
        safetensors.layout("a", [TensorEntry("x", "C128", (1,), BytesSource(bytes(16)))])


def test_a_name_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not valid Unicode: '\\udc80'"):
        safetensors.layout("a", [entry("x\udc80", "U8", (1,))])


def test_a_source_of_the_wrong_size_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"x: 5 bytes, but F32\[1\] takes 4"):
        safetensors.layout("a", [TensorEntry("x", "F32", (1,), BytesSource(bytes(5)))])


def test_a_header_longer_than_the_library_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER", 4096)
    with pytest.raises(ValueError, match="more than the 4096"):
        safetensors.layout("a", [entry("n" * 5000, "U8", (1,))])


def test_a_file_of_the_library_is_read_with_absolute_offsets(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    library_torch.save_file(
        {"w": torch.arange(4.0), "b": torch.tensor([7], dtype=torch.uint8)}, path, {"k": "v"}
    )
    tensors, metadata = safetensors.parse(safetensors.read_header(path), path.stat().st_size)
    data = path.read_bytes()
    assert metadata == {"k": "v"}
    assert (tensors["w"].dtype, tensors["w"].shape) == ("F32", (4,))
    assert struct.unpack("<4f", data[tensors["w"].begin : tensors["w"].end]) == (0.0, 1.0, 2.0, 3.0)
    assert data[tensors["b"].begin : tensors["b"].end] == b"\x07"


def test_read_header_returns_the_length_and_the_json_only(tmp_path: Path) -> None:
    header = safetensors.read_header(write(tmp_path / "a.safetensors", entry("x", "U8", (5000,))))
    assert len(header) == 4096 + safetensors.PHASE
    assert list(json.loads(header[8:])) == ["x"]


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CheckpointError, match="link: not a regular file but a symbolic link"):
        safetensors.read_header(tmp_path / "link")


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: not a regular file but a pipe"):
        safetensors.read_header(tmp_path / "pipe")


def test_a_directory_a_device_and_a_socket_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="but a directory"):
        safetensors.read_header(tmp_path)
    with pytest.raises(CheckpointError, match="but a device"):
        safetensors.read_header(Path("/dev/null"))
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(CheckpointError, match="but a socket"):
            safetensors.read_header(Path("socket"))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        safetensors.read_header(tmp_path / "none")


def test_read_header_does_not_read_what_a_false_length_asks_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<Q", 90_000_000) + b"{}")
    with pytest.raises(CheckpointError, match="a: the header claims 90000000 bytes, but the file has only 2"):
        safetensors.read_header(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="b: the file is truncated after 4 bytes"):
        safetensors.read_header(tmp_path / "b")
