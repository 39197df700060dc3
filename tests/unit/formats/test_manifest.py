from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from helpers.core.bare_core import block
from lastcall import errors
from lastcall.formats import manifest
from lastcall.formats.manifest import Piece
from lastcall.types import Group, Share, TensorEntry


def tensor(*pieces: tuple[list[int], list[int]], shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    found = [
        {"file": f"model-{n:05d}.safetensors", "key": f"w@{n}", "offset": offset, "shape": size}
        for n, (offset, size) in enumerate(pieces)
    ]
    return {"dtype": dtype, "shape": shape, "pieces": found}


def data(found: object) -> bytes:
    return json.dumps({"format": 1, "tensors": {"model": {"w": found}}}).encode()


def refused(found: object) -> str:
    with pytest.raises(errors.CheckpointError) as caught:
        manifest.parse(data(found))
    return str(caught.value)


def groups(rank: int) -> tuple[Group, ...]:
    """Half of w, and something of the rank's own."""
    half = TensorEntry(
        f"w@{2 * rank},0", "U8", (2, 3), block(bytes(6)), Share((4, 3), (2 * rank, 0), (rank,))
    )
    return (Group("model", (half, TensorEntry("bn", "U8", (2,), block(bytes(2))))), Group("rng", ()))


def test_what_the_ranks_wrote_is_read_as_one() -> None:
    described = [json.loads(json.dumps(manifest.describe(rank, groups(rank)))) for rank in (0, 1)]
    found = manifest.parse(manifest.merge(described))
    assert list(found) == ["model"] and list(found["model"]) == ["w"]
    whole = found["model"]["w"]
    assert (whole.dtype, whole.shape, whole.nbytes) == ("U8", (4, 3), 12)
    assert whole.pieces == (
        Piece("model-00000.safetensors", "w@0,0", (0, 0), (2, 3)),
        Piece("model-00001.safetensors", "w@2,0", (2, 0), (2, 3)),
    )


def test_merging_changes_nothing_of_what_it_was_given() -> None:
    described = [manifest.describe(rank, groups(rank)) for rank in (0, 1)]
    before = copy.deepcopy(described)
    manifest.merge(described)
    assert described == before


def test_a_tensor_that_is_whole_keeps_its_name_even_with_an_at_sign_in_it() -> None:
    entry = TensorEntry("odd@name", "U8", (2,), block(bytes(2)), Share((2,), (0,), (0,)))
    found = manifest.parse(manifest.merge([manifest.describe(0, [Group("model", (entry,))])]))
    assert found["model"]["odd@name"].pieces[0].key == "odd@name"


def test_ranks_without_anything_in_common_make_an_empty_manifest() -> None:
    assert manifest.parse(manifest.merge([{}, {}])) == {}


def test_a_rank_whose_pieces_are_missing_prevents_the_commit() -> None:
    with pytest.raises(errors.SaveError, match="the pieces have 6 elements, the whole has 12"):
        manifest.merge([manifest.describe(0, groups(0))])


def test_the_same_rank_twice_prevents_the_commit() -> None:
    with pytest.raises(errors.SaveError, match="pieces overlap"):
        manifest.merge([manifest.describe(0, groups(0))] * 2)


def test_ranks_with_other_shapes_prevent_the_commit() -> None:
    other = manifest.describe(1, groups(1))
    other["model"]["w"]["shape"] = [4, 4]
    with pytest.raises(
        errors.SaveError,
        match=r"model/w: it is U8 \(4, 3\) on one rank and 'U8' \(4, 4\) on "
        r"another",
    ):
        manifest.merge([manifest.describe(0, groups(0)), other])


@pytest.mark.parametrize(
    "broken", [{"model": []}, {"model": {"w": 3}}, {"model": {"w": {"dtype": "F32", "shape": [1]}}}, 7]
)
def test_a_part_file_that_makes_no_sense_prevents_the_commit(broken: Any) -> None:
    with pytest.raises(errors.SaveError):
        manifest.merge([manifest.describe(0, groups(0)), broken])


@pytest.mark.parametrize(
    "found",
    [
        tensor(([0, 0], [4, 4]), shape=[4, 4]),
        tensor(([0, 0], [4, 1]), ([0, 1], [4, 3]), shape=[4, 4]),
        tensor(([2, 0], [2, 4]), ([0, 2], [1, 2]), ([1, 2], [1, 2]), ([0, 0], [2, 2]), shape=[4, 4]),
        tensor(([], []), shape=[]),
        tensor(shape=[0, 3]),
        tensor(([0, 0], [0, 3]), ([0, 0], [0, 3]), shape=[0, 3]),
        tensor(([0, 0], [2, 0]), ([2, 0], [2, 0]), shape=[4, 0]),
    ],
    ids=lambda found: str([piece["shape"] for piece in found["pieces"]]),
)
def test_pieces_that_cover_the_whole_are_accepted(found: dict[str, Any]) -> None:
    assert len(manifest.parse(data(found))["model"]["w"].pieces) == len(found["pieces"])


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (tensor(([0, 0], [2, 4]), shape=[4, 4]), "have 8 elements, the whole has 16"),
        (tensor(([0, 0], [4, 4]), ([0, 0], [4, 4]), shape=[4, 4]), "have 32 elements"),
        (tensor(([0, 0], [2, 4]), ([1, 0], [2, 4]), shape=[4, 4]), "overlap"),
        (tensor(([0, 0], [3, 4]), ([2, 0], [1, 4]), shape=[4, 4]), "overlap"),
        (tensor(([], []), ([], []), shape=[]), "have 2 elements"),
        (tensor(([0, 0], [4, 5]), shape=[4, 4]), "exceeds the whole"),
        (tensor(([2**62, 0], [4, 4]), shape=[4, 4]), "exceeds the whole"),
        (tensor(([0, 0], [4, 4]), ([0, 0], [0, 4]), shape=[4, 4]), "empty"),
        (tensor(([0], [4]), shape=[4, 4]), "number of dimensions"),
        (tensor(([0, 0], [4]), shape=[4, 4]), "number of dimensions"),
        (tensor(([-1, 0], [4, 4]), shape=[4, 4]), "integers from 0"),
        (tensor(([0.0, 0], [4, 4]), shape=[4, 4]), "integers from 0"),  # type: ignore[list-item]
        (tensor(([False, 0], [4, 4]), shape=[4, 4]), "integers from 0"),
        (tensor(shape=[2**40, 2**40]), "overflows"),
        (tensor(shape=[0, 2**40, 2**40]), "overflows"),
        (tensor(([0], [4]), shape=[4], dtype="pickle"), "unknown dtype"),
        (tensor(([0], [4]), shape=[4], dtype=["F32"]), "unknown dtype"),  # type: ignore[arg-type]
        ({"dtype": "F32", "shape": [4]}, "expected an object"),
        ({"dtype": "F32", "shape": 4, "pieces": []}, "must be a list"),
        ({"dtype": "F32", "shape": [4], "pieces": {}}, "a list of pieces"),
        ({"dtype": "F32", "shape": [4], "pieces": [7]}, "expected a piece"),
        ({**tensor(([0], [4]), shape=[4]), "more": 1}, "expected an object"),
        (None, "expected an object"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said(found: object, why: str) -> None:
    said = refused(found)
    assert why in said and said.startswith("manifest.json: 'model' 'w': ")


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "a..safetensors", ".safetensors", "state.json", "", "x" * 300,  # noqa: E501
     5, None, "a\n.safetensors"],
)  # fmt: skip
def test_a_file_that_is_not_a_plain_name_is_refused(file: object) -> None:
    found = tensor(([0], [4]), shape=[4])
    found["pieces"][0]["file"] = file
    assert "is not the plain name" in refused(found)


def test_a_key_that_is_no_text_is_refused() -> None:
    found = tensor(([0], [4]), shape=[4])
    found["pieces"][0]["key"] = 5
    assert "is not text" in refused(found)


def test_a_pinwheel_which_no_ranks_lay_is_refused() -> None:
    pinwheel = tensor(
        ([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1]), shape=[3, 3]
    )
    assert "are arranged as no ranks would write them" in refused(pinwheel)


def test_a_spiral_is_refused_before_it_takes_long() -> None:
    size = 3000
    pieces, (low, high) = [], ([0, 0], [size, size])
    for turn in range(size):  # cut off a row, then a column, and so on: each cut leaves one piece
        dim = turn % 2
        box = [high[0] - low[0], high[1] - low[1]]
        box[dim] = 1
        pieces.append(([*low], box))
        low[dim] += 1
    pieces.append(([*low], [high[0] - low[0], high[1] - low[1]]))
    assert "are arranged as no ranks would write them" in refused(tensor(*pieces, shape=[size, size]))


def test_thousands_of_pieces_are_checked_quickly() -> None:
    grid = [([row, 10 * column], [1, 10]) for row in range(100) for column in range(100)]
    assert len(manifest.parse(data(tensor(*grid, shape=[100, 1000])))["model"]["w"].pieces) == 10_000


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{", b"\xff", b"null", b'{"format": 1}', b'{"format": 1, "tensors": []}',
        b'{"format": 1, "tensors": {"model": 1}}',
        b"[" * 100_000, b'{"format": 1, "tensors": {}, "more": 1}', b'{"format": ' + b"9" * 5000 + b', "tensors": {}}',  # noqa: E501
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(errors.CheckpointError, match="manifest.json"):
        manifest.parse(text)


def test_a_manifest_of_another_format_is_refused() -> None:
    with pytest.raises(errors.CheckpointError, match="newer lastcall"):
        manifest.parse(b'{"format": 2, "tensors": {}}')
