from __future__ import annotations

import ctypes
import random
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from helpers.models.roundtrip import read, write
from lastcall import errors
from lastcall.adapters.torch.tensors import arrays, dtypes, strided, tensors
from lastcall.formats import safetensors


def contiguous_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


LAYOUTS = {
    "contiguous": lambda: torch.randn(7, 5),
    "transposed": lambda: torch.randn(33, 17).t(),
    "channels_last": lambda: torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    "slice with a step": lambda: torch.randn(40, 9)[::3, 1::2],
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(3, 1, 0, 2),
    "zero-dimensional": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "one row": lambda: torch.randn(6, 6)[2:3, ::2],
    "bool, transposed": lambda: (torch.randn(9, 11) > 0).t(),
    "complex128, transposed": lambda: torch.randn(5, 6, dtype=torch.complex128).t(),
    "conjugate view": lambda: torch.randn(5, 6, dtype=torch.complex64).conj(),
    "requires grad": lambda: torch.randn(5, 6, requires_grad=True),
    "parameter, transposed": lambda: torch.nn.Parameter(torch.randn(5, 6).t()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_read_in_c_order_whatever_the_layout(layout: str) -> None:
    tensor = LAYOUTS[layout]()
    assert read(tensors.source(tensor), 1 << 20) == contiguous_bytes(tensor)
    assert read(tensors.source(tensor), 13) == contiguous_bytes(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_written_in_c_order_whatever_the_layout(layout: str) -> None:
    tensor = LAYOUTS[layout]()
    wanted = contiguous_bytes(tensor)
    with torch.no_grad():
        tensor.zero_()
    write(tensors.target(tensor), wanted, 13)
    assert contiguous_bytes(tensor) == wanted


def test_pieces_of_large_strided_tensors_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "PIECE", 64)
    tensor = torch.arange(4 * 50 * 30, dtype=torch.float64).reshape(4, 50, 30).permute(2, 0, 1)
    sizes = [piece.nbytes for piece in strided.pieces(tensor, 8, 3, tensor.numel() - 5)]
    assert max(sizes) <= 64 and sum(sizes) == (tensor.numel() - 8) * 8
    assert read(tensors.source(tensor), 1001) == contiguous_bytes(tensor)


def test_ranges_at_any_byte_are_right() -> None:
    tensor = torch.randn(19, 23, dtype=torch.float64).t()
    data, source = contiguous_bytes(tensor), tensors.source(tensor)
    for _ in range(200):
        begin = random.randrange(len(data))
        length = random.randrange(0, len(data) - begin + 1)
        buffer = ctypes.create_string_buffer(max(1, length))
        source.read_into(ctypes.addressof(buffer), begin, length)
        assert buffer.raw[:length] == data[begin : begin + length]


def test_threads_that_share_an_element_do_not_lose_its_bytes() -> None:
    tensor = torch.zeros(64, 65, dtype=torch.complex128).t()
    wanted = bytes(random.randbytes(tensor.nbytes))
    target, buffer = tensors.target(tensor), ctypes.create_string_buffer(wanted, len(wanted))
    cuts = list(range(0, len(wanted), 5))

    def work(mine: list[int]) -> None:
        for cut in mine:
            target.write_from(ctypes.addressof(buffer) + cut, cut, min(5, len(wanted) - cut))

    threads = [threading.Thread(target=work, args=(cuts[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contiguous_bytes(tensor) == wanted


def test_reading_a_strided_array_needs_little_extra_memory() -> None:
    array = np.zeros((3000, 4000)).T
    tracemalloc.start()
    try:
        buffer = ctypes.create_string_buffer(64)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        source = arrays.of(array)
        for offset in range(0, source.nbytes, source.nbytes // 5):
            source.read_into(ctypes.addressof(buffer), offset, 64)
        big = np.empty(20 << 20, np.uint8)
        before += big.nbytes
        source.read_into(big.ctypes.data, 1001, big.nbytes)
        assert tracemalloc.get_traced_memory()[1] - before < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", dtypes.CODES)
def test_every_code_is_one_that_the_format_knows_with_the_same_size(dtype: torch.dtype) -> None:
    code, shape = dtypes.stored_as(dtype, (3,))
    assert shape == (3,) and safetensors.DTYPES[code] == dtype.itemsize
    assert dtypes.by_name(dtypes.name_of(dtype)) is dtype


def test_element_types_without_a_code_are_stored_as_plain_numbers() -> None:
    assert dtypes.stored_as(torch.complex128, (3,)) == ("F64", (3, 2))
    assert dtypes.stored_as(torch.float8_e5m2fnuz, (3,)) == ("U8", (3, 1))
    assert dtypes.numpy_stored_as(np.dtype(">f4"), (3,)) == ("U8", (3, 4))
    assert dtypes.numpy_stored_as(np.dtype("M8[ns]"), ()) == ("U8", (8,))


@pytest.mark.parametrize("name", ["qint8", "Tensor", "nn", "", None, ["float32"]])
def test_a_dtype_that_is_none_is_refused(name: object) -> None:
    with pytest.raises(errors.CheckpointError, match="dtype"):
        dtypes.by_name(name)


@pytest.mark.parametrize(
    "descr", ["O", "|O", [("a", "O")], "no such thing", 7, None, "", [["a"]], [("a", "<f4", "x")]]
)
def test_a_numpy_dtype_that_is_none_or_holds_objects_is_refused(descr: object) -> None:
    with pytest.raises(errors.CheckpointError, match="numpy dtype"):
        dtypes.numpy_by_descr(descr)


def test_expanded_dimensions_are_made_dense() -> None:
    tensor = torch.arange(4.0).reshape(4, 1).expand(4, 1000)
    assert tensors.dense(tensor).shape == (4, 1)
    plain = torch.randn(3, 4)
    assert tensors.dense(plain) is plain


ARRAYS = {
    "contiguous": lambda: np.arange(12.0).reshape(3, 4),
    "transposed": lambda: np.arange(12.0).reshape(3, 4).T,
    "reversed": lambda: np.arange(24)[::-2],
    "big-endian, strided": lambda: np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2],
    "records, strided": lambda: np.array([(1, 2.0), (3, 4.0), (5, 6.0)], dtype=[("a", "i2"), ("b", "f8")])[
        ::2
    ],
    "text": lambda: np.array(["abc", "d"]),
    "zero-dimensional": lambda: np.array(4.0),
    "empty": lambda: np.empty((0, 3)),
}


@pytest.mark.parametrize("layout", ARRAYS)
def test_arrays_are_read_and_written_in_c_order(layout: str) -> None:
    array = ARRAYS[layout]()
    wanted = array.tobytes()
    assert read(arrays.of(array), 7) == wanted
    blank = ARRAYS[layout]()
    blank[...] = np.zeros((), blank.dtype)
    write(arrays.of(blank), wanted, 7)
    assert blank.tobytes() == wanted


def test_arrays_that_hold_more_than_bytes_are_refused_by_path() -> None:
    with pytest.raises(errors.StateError, match=r"extra\['a'\].*Python objects.*tolist"):
        arrays.check(np.array([{}, None]), "extra['a']")
    with pytest.raises(errors.StateError, match="MaskedArray"):
        arrays.check(np.ma.masked_array([1, 2], [True, False]), "extra")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse tensor.*to_dense"),
        (lambda: torch.empty(3, device="meta"), "meta device.*to_empty"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized.*int_repr"),
        (lambda: torch.nn.LazyLinear(3).weight, "no shape yet.*one batch"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "nested.*unbind",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_bytes_are_refused_with_a_remedy(make: object, said: str) -> None:
    with pytest.raises(errors.StateError, match=rf"model\['w'\].*{said}"):
        tensors.check(make(), "model['w']")  # type: ignore[operator]


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    with pytest.raises(errors.StateError, match="FakeTensor"):
        tensors.check(fake, "x")


def test_one_stored_tensor_can_go_to_several_live_ones() -> None:
    one, other = torch.zeros(4), torch.zeros(2, 2).t()
    several = tensors.Several((tensors.target(one), tensors.target(other)))
    write(several, contiguous_bytes(torch.arange(4.0)), 3)
    assert one.tolist() == [0, 1, 2, 3] and other.tolist() == [[0, 1], [2, 3]]


def test_the_memory_of_a_tensor_outlives_the_tensor() -> None:
    source = tensors.source(torch.full((1000,), 7.0))
    filler = [torch.zeros(1000) for _ in range(20)]
    assert read(source) == contiguous_bytes(torch.full((1000,), 7.0)) and filler
