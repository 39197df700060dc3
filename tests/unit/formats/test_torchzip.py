from __future__ import annotations

import io
import mmap
import pickletools
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lastcall.errors import StateError
from lastcall.formats import layouts, torchzip
from lastcall.memory import BytesSource, HostMemory
from lastcall.types import FileLayout

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


class Converter:
    """torch's tensors as the format sees them: one source a storage. An object met twice stays one object."""

    def __init__(self) -> None:
        self.sources: dict[int, HostMemory] = {}
        self.done: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) not in self.done:
            self.done[id(value)] = self.convert(value)
        return self.done[id(value)]

    def convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if type(value) is OrderedDict:
            ordered = OrderedDict((key, self(item)) for key, item in value.items())
            vars(ordered).update(vars(value))
            return ordered
        if type(value) is dict:
            return {key: self(item) for key, item in value.items()}
        if type(value) is list:
            return [self(item) for item in value]
        return value

    def tensor(self, value: torch.Tensor) -> torchzip.ZippedTensor:
        storage = value.untyped_storage()
        source = HostMemory(storage.data_ptr(), storage.nbytes(), storage)
        return torchzip.ZippedTensor(
            dtype=CODES[value.dtype],
            shape=tuple(value.shape),
            strides=value.stride(),
            source=self.sources.setdefault(storage._cdata, source),
            requires_grad=value.requires_grad,
            parameter=isinstance(value, torch.nn.Parameter),
            offset=value.storage_offset(),
        )


def build(value: object, **options: bool) -> bytes:
    return layouts.materialize(torchzip.layout("a.pt", Converter()(value), **options))


LOADERS: dict[str, Callable[[Path], Any]] = {
    "weights_only": lambda path: torch.load(path, weights_only=True),
    "mapped": lambda path: torch.load(path, weights_only=True, mmap=True),
    "plain": lambda path: torch.load(path, weights_only=False),
}


@pytest.fixture(params=LOADERS)
def roundtrip(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[object], Any]:
    def through(value: object) -> Any:
        (tmp_path / "a.pt").write_bytes(build(value))
        return LOADERS[request.param](tmp_path / "a.pt")

    return through


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype_comes_back_with_its_bytes(
    roundtrip: Callable[[object], Any], dtype: torch.dtype
) -> None:
    tensor = torch.tensor([0, 1] * 48, dtype=torch.uint8).view(dtype)
    loaded = roundtrip({"x": tensor})["x"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_scalars_and_empty_tensors_come_back(roundtrip: Callable[[object], Any]) -> None:
    loaded = roundtrip([torch.tensor(2.5), torch.zeros(0), torch.zeros(2, 0, 3), torch.tensor(7)])
    assert loaded[0].shape == () and loaded[0].item() == 2.5
    assert loaded[1].shape == (0,)
    assert loaded[2].shape == (2, 0, 3) and loaded[2].stride() == (3, 3, 1)
    assert loaded[3].dtype == torch.int64 and loaded[3].item() == 7


def test_views_of_one_storage_still_share_it(roundtrip: Callable[[object], Any]) -> None:
    base = torch.arange(20.0)
    content = build([base, base[3:9]])
    assert [name for name in zipfile.ZipFile(io.BytesIO(content)).namelist() if "/data/" in name] == [
        "archive/data/0"
    ]
    loaded = roundtrip([base, base[3:9], base.view(4, 5).t()])
    assert torch.equal(loaded[1], base[3:9]) and torch.equal(loaded[2], base.view(4, 5).t())
    assert loaded[2].stride() == (1, 5) and not loaded[2].is_contiguous()
    loaded[0][3] = 100.0
    assert loaded[1][0] == 100.0 and loaded[2][3, 0] == 100.0


def test_one_storage_seen_as_two_dtypes_comes_back_as_two(roundtrip: Callable[[object], Any]) -> None:
    base = torch.tensor([1 + 2j, 3 + 4j])
    for tree in ([base, torch.view_as_real(base)], [torch.view_as_real(base), base]):
        loaded = roundtrip(tree)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(loaded, tree, strict=True))
        assert loaded[0].untyped_storage().data_ptr() == loaded[1].untyped_storage().data_ptr()


def test_a_storage_of_an_odd_size_comes_back(roundtrip: Callable[[object], Any]) -> None:
    odd = torch.frombuffer(bytearray(struct.pack("<2fB", 1.5, 2.5, 9)), dtype=torch.uint8)
    view = torch.empty(0).set_(odd.untyped_storage(), 0, (2,), (1,))
    assert roundtrip({"x": view})["x"].tolist() == [1.5, 2.5]


def test_parameters_and_gradient_flags_come_back(roundtrip: Callable[[object], Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    frozen = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
    small = torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2), requires_grad=False)
    loaded = roundtrip([weight, frozen, torch.ones(1, requires_grad=True), torch.ones(1), small])
    kinds = [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor, torch.Tensor, torch.nn.Parameter]
    assert [type(item) for item in loaded] == kinds
    assert [item.requires_grad for item in loaded] == [True, False, True, False, False]
    assert torch.equal(loaded[0], weight)


def test_the_same_tensor_twice_is_one_object_after_loading(roundtrip: Callable[[object], Any]) -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    loaded = roundtrip({"a": tensor, "b": [tensor]})
    assert loaded["a"] is loaded["b"][0]


INTEGERS = [
    0,
    1,
    255,
    256,
    65535,
    65536,
    -1,
    -(2**31),
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    10**40,
    -(10**40),
    -(2**63),
    2**1999,
]
PLAIN: dict[str, object] = {
    "integers": INTEGERS,
    "floats": [0.0, -0.0, 1e-300, float("inf"), 0.1],
    "constants": (None, True, False),
    "strings": ["", "a", "\u6a21\U0001f642", "\x00", "\udc80", "x" * 70_000],
    "bytes": [b"", b"a", bytes(range(256)), b"x" * 70_000],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),)),
    "lists": [[], [1], [[]], list(range(2500)), list(range(1001))],
    "dicts": {1: {}, "a": {"b": 1}, (1, 2): None, None: 0, "many": {str(n): n for n in range(2500)}},
    "sets": [set(), {1, 2, 3}, {"a"}],  # of strings only one: their order changes from process to process
    "ordered": OrderedDict(b=1, a=OrderedDict(), c={}),
    "root": 5,
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_come_back_equal_and_of_their_types(
    roundtrip: Callable[[object], Any], name: str
) -> None:
    loaded = roundtrip(PLAIN[name])
    assert loaded == PLAIN[name]
    assert repr(loaded) == repr(PLAIN[name])


def test_an_integer_too_long_for_weights_only_still_loads_plainly() -> None:
    content = io.BytesIO(build([2**5000]))
    assert torch.load(content, weights_only=False) == [2**5000]


def test_an_object_met_twice_is_one_object_after_loading(roundtrip: Callable[[object], Any]) -> None:
    shared = [1, 2]
    tree: dict[str, object] = {"a": shared, "b": (shared, shared)}
    loaded = roundtrip(tree)
    assert loaded["b"][0] is loaded["b"][1]


def test_more_than_256_objects_are_remembered(roundtrip: Callable[[object], Any]) -> None:
    tree = {f"layer.{n}.weight": torch.full((n % 5,), float(n)) for n in range(300)}
    loaded = roundtrip({"state": tree, "again": list(tree)})
    assert loaded["again"] == list(tree)
    assert all(torch.equal(loaded["state"][name], tensor) for name, tensor in tree.items())


def training_state() -> dict[str, object]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


def test_a_training_state_loads_into_its_model_with_versions(roundtrip: Callable[[object], Any]) -> None:
    state = training_state()
    loaded = roundtrip(state)
    assert loaded["model"]._metadata == state["model"]._metadata  # type: ignore[attr-defined]
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.load_state_dict(loaded["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded["optimizer"])
    assert torch.equal(model[0].weight, state["model"]["0.weight"])  # type: ignore[index]


def test_the_file_is_byte_for_byte_the_one_torch_saves_but_for_the_serialization_id() -> None:
    base = torch.arange(20.0)
    views = [
        base[3:9],
        base.view(4, 5).t(),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.ones(1, requires_grad=True),
    ]
    odd = [
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.zeros(2, dtype=torch.uint16),
        torch.ones(1, dtype=torch.complex64),
    ]
    # weights_only cannot load torch's b""
    plain = {key: value for key, value in PLAIN.items() if key != "bytes"}
    tree = {"state": training_state(), "views": views, "odd": odd, "plain": plain, "bytes": [b"a", b"abc"]}
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    theirs, ours = buffer.getvalue(), build(tree)
    differing = {place for place, (one, other) in enumerate(zip(theirs, ours, strict=True)) if one != other}
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        identity = archive.getinfo("archive/.data/serialization_id")
        begin = ours.index(archive.read(identity), identity.header_offset)
        directory = ours.index(b"PK\1\2", begin)
        crc_in_directory = ours.rindex(b"PK\1\2") + 16
    assert begin % 64 == 0
    assert differing <= {*range(begin, directory), *range(crc_in_directory, crc_in_directory + 4)}


def test_checksums_hold_and_every_record_is_aligned(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(build({"x": torch.randn(600_000), "y": torch.randn(3), "z": torch.zeros(0)}))
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = [info.filename.removeprefix("archive/") for info in archive.infolist()]
        for info in archive.infolist():
            name_length, extra_length = struct.unpack_from("<2H", content, info.header_offset + 26)
            assert (info.header_offset + 30 + name_length + extra_length) % 64 == 0
    records = [
        "data.pkl",
        ".format_version",
        ".storage_alignment",
        "byteorder",
        "data/0",
        "data/1",
        "data/2",
        "version",
    ]
    assert names == [*records, ".data/serialization_id"]


def test_without_checksums_no_source_is_read_and_torch_still_loads() -> None:
    content = build({"x": torch.arange(5)}, crc=False)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {info.CRC for info in archive.infolist()} == {0}
    assert torch.load(io.BytesIO(content), weights_only=True)["x"].tolist() == [0, 1, 2, 3, 4]
    torchzip.layout("a.pt", unreadable(1 << 50), crc=False)


def test_equal_states_give_equal_files() -> None:
    assert build({"x": torch.ones(5)}) == build({"x": torch.ones(5)})
    assert build({"x": torch.ones(5)}) != build({"x": torch.zeros(5)})


def test_torch_finds_the_offsets_by_computing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.serialization import config

    path = tmp_path / "a.pt"
    tree = [torch.randn(n) for n in (3, 0, 17, 1000)]
    path.write_bytes(build(tree))
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch then compares with the offsets that it reads
    with config.patch("load.calculate_storage_offsets", True):
        loaded = torch.load(path, weights_only=True, mmap=True)
    assert all(torch.equal(one, other) for one, other in zip(loaded, tree, strict=True))


class Unreadable:
    """A source of any size that must not be read."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        raise AssertionError("this source must not be read")


def unreadable(*sizes: int) -> list[torchzip.ZippedTensor]:
    return [torchzip.ZippedTensor("F32", (size // 4,), None, Unreadable(size)) for size in sizes]


def write_sparse(path: Path, layout: FileLayout) -> Path:
    """Everything but the unreadable sources, whose place stays a hole."""
    layouts.check(layout)
    with path.open("wb") as file:
        for extent in layout.extents:
            if isinstance(extent.source, BytesSource):
                file.seek(extent.offset)
                file.write(extent.source.data)
        file.truncate(layout.size)
    return path


@pytest.mark.parametrize(
    "sizes",
    [
        (2**32, 20),
        (2**32 - 4, 20),
        (2**31, 2**31, 2**31, 64),
        (2**32 + 4, 2**33, 4),
    ],
)
def test_headers_of_huge_records_are_what_torch_writes(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    theirs = tmp_path / "archive.pt"
    tensors = [torch.empty(size // 4) for size in sizes]  # never touched: no memory behind them
    with torch.serialization.skip_data():
        torch.save(tensors, theirs)
    layout = torchzip.layout("archive.pt", unreadable(*sizes), crc=False)
    ours = write_sparse(tmp_path / "ours.pt", layout)
    assert ours.stat().st_size == theirs.stat().st_size
    with zipfile.ZipFile(ours) as one, zipfile.ZipFile(theirs) as other:
        assert [vars_of(info) for info in one.infolist()] == [vars_of(info) for info in other.infolist()]
        offsets = [info.header_offset for info in one.infolist() if "/data/" in info.filename]
    for offset in offsets:
        assert read_at(ours, offset, 150) == read_at(theirs, offset, 150)
    assert read_at(ours, layout.size - 98, 98) == read_at(theirs, layout.size - 98, 98)


def vars_of(info: zipfile.ZipInfo) -> tuple[object, ...]:
    return info.filename, info.header_offset, info.file_size, info.compress_size, info.flag_bits, info.extra


def read_at(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def test_torch_maps_a_file_of_more_than_four_gigabytes(tmp_path: Path) -> None:
    huge = unreadable(2**32 + 64)
    small = torchzip.ZippedTensor("I64", (2,), None, BytesSource(struct.pack("<2q", 7, -8)))
    path = write_sparse(
        tmp_path / "a.pt", torchzip.layout("a.pt", {"huge": huge[0], "small": small}, crc=False)
    )
    # a private map counts as memory in use
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["huge"].shape == (2**30 + 16,)
    assert loaded["huge"][-1] == 0.0
    assert loaded["small"].tolist() == [7, -8]


def test_more_records_than_a_plain_zip_can_count_are_found(tmp_path: Path) -> None:
    archive = torchzip._Archive(crc=False)
    archive.add("version", BytesSource(b"3\n"))
    for number in range(66_000):
        archive.add(f"data/{number}", BytesSource(b"%d" % number))
    path = tmp_path / "a.pt"
    path.write_bytes(layouts.materialize(archive.layout("a.pt")))
    reader = torch._C.PyTorchFileReader(str(path))
    assert len(reader.get_all_records()) == 66_001
    assert reader.get_record("data/65999") == b"65999"


class Custom:
    pass


class Name(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Custom(),
        Name("a"),
        defaultdict(list),
        Counter(),
        frozenset(),
        1j,
        bytearray(),
        range(3),
        torch.float32,
        len,
        Custom,
    ],
)
def test_what_is_not_plain_is_refused_with_its_path(value: object) -> None:
    with pytest.raises(StateError, match=r"^\['a'\]\[1\] is a .*turn it into"):
        torchzip.layout("a.pt", {"a": [0, value]})


def test_an_unknown_dtype_is_refused_with_its_path() -> None:
    with pytest.raises(StateError, match=r"\['x'\] has dtype 'F4'"):
        torchzip.layout("a.pt", {"x": torchzip.ZippedTensor("F4", (2,), None, BytesSource(b"1"))})


def test_a_tensor_that_leaves_its_storage_is_caught() -> None:
    source = BytesSource(bytes(16))
    for shape, strides, offset in [((5,), None, 0), ((2, 2), (2, 2), 0), ((4,), None, 1)]:
        with pytest.raises(AssertionError, match="16 bytes, the tensor reaches to 20"):
            torchzip.layout("a.pt", [torchzip.ZippedTensor("F32", shape, strides, source, offset=offset)])
    with pytest.raises(AssertionError, match="with strides"):
        torchzip.layout("a.pt", [torchzip.ZippedTensor("F32", (2, 2), (1,), source)])


def test_a_list_that_contains_itself_comes_back_as_one() -> None:
    loop: list[object] = [1]
    loop.append(loop)
    loaded = torch.load(io.BytesIO(layouts.materialize(torchzip.layout("a.pt", loop))), weights_only=True)
    assert loaded[1] is loaded


def test_a_tuple_that_contains_itself_is_refused() -> None:
    inner: list[object] = []
    loop = (inner,)
    inner.append(loop)
    with pytest.raises(StateError, match="the root is a tuple that contains itself"):
        torchzip.layout("a.pt", loop)


def test_a_tree_without_end_is_refused() -> None:
    tree: list[object] = []
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(StateError, match="nested too deeply"):
        torchzip.layout("a.pt", tree)


def test_the_pickle_names_nothing_but_what_it_needs() -> None:
    content = build({"state": training_state(), "plain": PLAIN})
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found = {
            (code.name, argument)
            for code, argument, _ in pickletools.genops(archive.read("archive/data.pkl"))
        }
    names = {argument for name, argument in found if name == "GLOBAL"}
    assert names == {
        "torch._utils _rebuild_tensor_v2",
        "torch FloatStorage",
        "torch LongStorage",
        "torch ByteStorage",
        "collections OrderedDict",
        "__builtin__ set",
        "_codecs encode",
    }


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, lastcall.formats.torchzip; sys.exit(bool({'torch', 'numpy', 'safetensors'} & "
        "sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
