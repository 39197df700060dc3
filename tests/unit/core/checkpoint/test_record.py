from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from lastcall import errors
from lastcall.core.checkpoint import record as records
from lastcall.core.engine import digest
from lastcall.types import FileRecord, Kind


def file(name: str = "model.safetensors", size: int = 10_000, chunk: int = 4096) -> FileRecord:
    chunks = tuple(digest.of(f"{name} {n}".encode()) for n in range(-(-size // chunk)))
    return FileRecord(name, size, digest.over(chunks), chunk, chunks)


FULL = records.Record(
    sequence=3,
    step=1347,
    kind=Kind.RESCUE,
    reason="SIGTERM",
    exact=False,
    files=(file(), file("state.json", 12), file("empty.safetensors", 0)),
    because="the optimizer has stepped",
    missing=("optimizer.safetensors",),
    run="abc",
    incarnation=2,
    created=1700000000.25,
    seconds=2.5,
    written=10_012,
    metrics={"loss": 0.1, "steps": 3},
)


def signed(body: dict[str, Any]) -> bytes:
    """A record as somebody with bad intentions would make it: with the right digest."""
    body = {key: value for key, value in body.items() if key != "digest"}
    return json.dumps({**body, "digest": digest.of(json.dumps(body, sort_keys=True).encode())}).encode()


def body() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FULL.to_json())
    return found


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / records.NAME).write_bytes(FULL.to_json())
    assert records.read(tmp_path) == FULL
    assert records.parse(signed(body())) == FULL


def test_what_a_record_says_of_itself() -> None:
    assert not FULL.complete
    assert dataclasses.replace(FULL, missing=()).complete
    assert FULL.size == 10_012
    assert FULL.file("state.json") == FULL.files[1]
    assert FULL.file("nothing") is None


def test_metrics_that_are_not_finite_survive() -> None:
    odd = dataclasses.replace(FULL, metrics={"a": math.nan, "b": math.inf, "c": -math.inf})
    back = records.parse(odd.to_json())
    assert math.isnan(back.metrics["a"])
    assert (back.metrics["b"], back.metrics["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("field", sorted(body()))
def test_a_field_that_was_tampered_with_breaks_the_digest(field: str) -> None:
    changed = body()
    value = changed[field]
    if isinstance(value, dict | bool):
        changed[field] = not value
    else:
        changed[field] = value + value if value else "x"
    assert changed[field] != value
    with pytest.raises(errors.CheckpointError):
        records.parse(json.dumps(changed).encode())


@pytest.mark.parametrize("field", sorted(body()))
def test_a_field_that_is_gone_breaks_the_digest(field: str) -> None:
    changed = body()
    del changed[field]
    with pytest.raises(errors.CheckpointError):
        records.parse(json.dumps(changed).encode())


def test_every_single_byte_of_the_record_counts() -> None:
    data = FULL.to_json()
    for position in range(len(data)):
        broken = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        try:
            assert records.parse(broken) == FULL
        except errors.CheckpointError:
            continue
        assert data[position : position + 1] in b" \t\n\r", f"byte {position} is not covered"


WRONG: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("sequence", "step", "incarnation", "world", "written")
        for value in (-1, 1.5, True, "1", None)
    ),
    *((name, value) for name in ("reason", "because", "run") for value in (1, None, ["x"], {"x": 1})),
    *((name, value) for name in ("created", "seconds") for value in ("1", None, True, [1])),
    *(  # type: ignore[var-annotated]
        ("metrics", value)
        for value in (None, [], "x", {"loss": "low"}, {"loss": None}, {"loss": [1]}, {"loss": {"a": 1}})
    ),
    *(("exact", value) for value in (1, 0, None, "yes")),
    *(("kind", value) for value in ("other", None, 1, [], {})),  # type: ignore[var-annotated]
    *(("files", value) for value in (None, 1, "x", [1], [None], ["x"], [[]], [{}], {"a": 1})),  # type: ignore[var-annotated]
    *(("missing", value) for value in (None, 1, [1], [None])),
    *(("algorithm", value) for value in ("md5", None, 1, [], {})),  # type: ignore[var-annotated]
    *(("format", value) for value in (2, 0, "1", None, [])),  # type: ignore[var-annotated]
    ("surprise", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=repr)
def test_a_wrong_value_is_refused_though_the_digest_is_right(field: str, value: object) -> None:
    with pytest.raises(errors.CheckpointError):
        records.parse(signed({**body(), field: value}))


NAMES = [
    "../x",
    "a/../b",
    "a/..",
    "a//b",
    "/a",
    "a/",
    "/",
    "a/./b",
    "a/..b",
    "a/.-b",
    "a/-b",
    "a/ b",
    "a/b ",
    f"{records.NAME}/x",
    f"{records.SENTINEL}/x",
    "/".join("abcdefghi"),
    "a/" + "x" * 201,
    "",
    ".",
    "..",
    "/etc/passwd",
    "a\x00b",
    records.NAME,
    records.SENTINEL,
    "..x",
    "x..",
    "a\\b",
    "-rf",
    ".-x",
    " a",
    "a ",
    "a\n",
    "a\tb",
    "é" * 101,
    "\ud800",
    "x" * 201,
    "C:x",
    "~",
    "*",
    None,
    1,
    ["x"],
    {"x": 1},
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_not_a_plain_name_in_the_folder_is_refused(name: object) -> None:
    changed = body()
    changed["files"][0]["name"] = name
    with pytest.raises(errors.CheckpointError):
        records.parse(signed(changed))


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "model.safetensors",
        "model.frozen.safetensors",
        "x_1-2.bin",
        "_x",
        "x" * 200,
        "a/b",
        "a/b.c/d",
        "a/.metadata",
        "my adapter (2)/é.bin",
        f"a/{records.NAME}",
        "/".join("abcdefgh"),
    ],
)
def test_plain_names_are_taken_also_in_folders(name: str) -> None:
    plain = dataclasses.replace(FULL, files=(file(name),))
    assert records.parse(plain.to_json()) == plain


def test_a_file_named_twice_is_refused() -> None:
    with pytest.raises(errors.CheckpointError, match="named twice"):
        records.parse(dataclasses.replace(FULL, files=(file(), file())).to_json())


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1}, {"size": 1.0}, {"size": True}, {"size": "10000"}, {"size": 20_000}, {"size": 0}, {"size": None},  # noqa: E501
        {"size": 1 << 80}, {"chunk": 0}, {"chunk": -4096}, {"chunk": 1}, {"chunk": 4096.0}, {"chunk": None}, {"chunk": True},  # noqa: E501
        {"chunks": []}, {"chunks": ["a", "b", "c"]}, {"chunks": "abc"}, {"chunks": [1, 2, 3]}, {"chunks": None}, {"chunks": 3},  # noqa: E501
        {"digest": "0" * 32}, {"digest": None}, {"digest": 1}, {"surprise": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_counts_of_a_file_are_refused(change: dict[str, object]) -> None:
    changed = body()
    changed["files"][0].update(change)
    with pytest.raises(errors.CheckpointError):
        records.parse(signed(changed))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[]", b"1", b'"x"', b"\x00" * 64, b"\xff\xfe\x00", b"PK\x03\x04", b"{}", b'{"format": 1}',  # noqa: E501
        b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b'{"format": 1, "digest": {}, "algorithm": '
                                                           b'"xxh3-128"}',
    ],
    ids=lambda data: ascii(data[:12]),
)  # fmt: skip
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(errors.CheckpointError):
        records.parse(data)


def test_deep_nesting_inside_a_field_is_refused() -> None:
    deep = (
        b'{"format": 1, "digest": "", "algorithm": "xxh3-128", "metrics": '
        + b"[" * 90_000
        + b"]" * 90_000
        + b"}"
    )
    with pytest.raises(errors.CheckpointError):
        records.parse(deep)


def test_a_record_of_a_newer_version_says_so() -> None:
    with pytest.raises(errors.CheckpointError, match="newer lastcall"):
        records.parse(signed({**body(), "format": 2}))


def test_a_record_that_is_missing_or_a_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError, match="No such file"):
        records.read(tmp_path)
    (tmp_path / "elsewhere").write_bytes(FULL.to_json())
    (tmp_path / records.NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.CheckpointError, match="cannot be opened"):
        records.read(tmp_path)


def test_a_pipe_in_the_place_of_the_record_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / records.NAME)
    with pytest.raises(errors.CheckpointError, match="not a plain file"):
        records.read(tmp_path)


def test_a_folder_in_the_place_of_the_record_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / records.NAME).mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.CheckpointError, match="not a plain file"):
        records.read(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_giant_is_not_read(tmp_path: Path) -> None:
    (tmp_path / records.NAME).touch()
    os.truncate(tmp_path / records.NAME, 1 << 40)
    with pytest.raises(errors.CheckpointError, match="more than the"):
        records.read(tmp_path)


def test_a_file_of_exactly_the_largest_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert records.read_regular(tmp_path / "f", 5) == b"12345"
    with pytest.raises(errors.CheckpointError):
        records.read_regular(tmp_path / "f", 4)
