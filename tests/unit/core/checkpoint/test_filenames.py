from __future__ import annotations

import pytest

from lastcall.core.checkpoint import filenames


def test_one_process_has_plain_names_and_many_ranks_numbered_ones() -> None:
    assert (filenames.document(), filenames.tensors("model")) == ("state.json", "model.safetensors")
    assert (filenames.document(3), filenames.tensors("model", 3), filenames.part(3)) == (
        "state-00003.json", "model-00003.safetensors", "part-00003.json",
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 7, 99_999, 100_000])
def test_the_rank_is_read_from_every_name_that_it_gave(rank: int) -> None:
    for name in (filenames.document(rank), filenames.tensors("model.frozen", rank), filenames.part(rank)):
        assert filenames.rank_of(name) == rank


@pytest.mark.parametrize(
    "name", ["state.json", "model.safetensors", "manifest.json", "model-1.safetensors", "model-00001.pt", ""]
)
def test_names_without_a_rank_are_rank_0s(name: str) -> None:
    assert filenames.rank_of(name) == 0


def test_the_group_is_read_from_the_files_of_one_rank_alone() -> None:
    assert filenames.group_of("model.frozen.safetensors") == "model.frozen"
    assert filenames.group_of("model.frozen-00002.safetensors", 2) == "model.frozen"
    assert filenames.group_of("model-00001.safetensors", 2) is None
    assert filenames.group_of("state-00002.json", 2) is None and filenames.group_of("manifest.json") is None
