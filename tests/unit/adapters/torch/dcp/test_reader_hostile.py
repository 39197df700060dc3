"""lastcall.dcp.Reader on checkpoints that it did not write: those of protect(), and those that were made to
do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import lastcall
from helpers.core import forging
from lastcall import errors
from lastcall.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:torch.distributed is unavailable"
)


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, storage_reader=Reader(path, threads=2), no_dist=True)
    return state


def test_the_tensors_of_a_protected_run_are_offered_with_the_names_that_it_gave(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with lastcall.protect(tmp_path / "run", model=model, optimizer=optimizer, note="text") as run:
        for _ in run.steps(2):
            optimizer.step()
        path = run.save()
    assert path is not None
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    found = load(path, state)["model"]
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    made = _load_state_dict_from_keys({"model"}, storage_reader=Reader(path))
    assert made["model"].keys() == model.state_dict().keys()
    assert not any("note" in name for name in Reader(path).read_metadata().state_dict_metadata)


def test_the_pieces_of_many_ranks_are_put_together(tmp_path: Path) -> None:
    path = forging.commit(tmp_path / "c", forging.two_ranks(), world=2)
    state = {
        "model": {
            "w": torch.zeros(2, 4),
            "b": torch.zeros(2),
            "none": torch.zeros(0, 3),
            "mean": torch.zeros(1),
        }
    }
    found = load(path, state)["model"]
    assert torch.equal(found["w"], torch.arange(8.0).reshape(2, 4))
    assert (found["b"].tolist(), found["mean"].tolist()) == ([8.0, 9.0], [10.0])


@pytest.mark.parametrize("case", forging.HOSTILE)
def test_a_hostile_manifest_is_refused(tmp_path: Path, case: str) -> None:
    change, words = forging.HOSTILE[case]
    files = forging.two_ranks()
    change(files)
    forging.commit(tmp_path / "c", files, world=2)
    state = {"model.w": torch.zeros(2, 4)}
    with pytest.raises(BaseException) as caught:
        load(tmp_path / "c", state)
    assert words in str(caught.value)
    assert not state["model.w"].any()


def forged(tmp_path: Path, **changes: Any) -> Path:
    """What Writer wrote, with parts of its document exchanged, and digests that hold."""
    dcp.save(
        {"a": {"b": torch.zeros(4, dtype=torch.complex128)}, "n": 1},
        storage_writer=Writer(tmp_path / "c"),
        no_dist=True,
    )
    files = {
        path.name: path.read_bytes() for path in (tmp_path / "c").iterdir() if path.name != "lastcall.json"
    }
    document = json.loads(files["state-00000.json"])
    document["dcp"].update(changes)
    files["state-00000.json"] = json.dumps(document).encode()
    return forging.commit(tmp_path / "c", files)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"values": []}, "not an object"),
        ({"dtypes": 3}, "not an object"),
        ({"dtypes": {"a.b": "qint8"}}, "does not have"),
        ({"dtypes": {"a.b": "int64"}}, "is not how"),
        ({"dtypes": {"a.b": "float8_e5m2fnuz"}}, "is not how"),
        ({"paths": {"a.b": ["a", 10**12]}}, "cannot be"),
        ({"paths": {"a.b": ["__class__"]}}, "cannot be"),
        ({"paths": {"a.b": "ab"}}, "cannot be"),
    ],
)
def test_a_hostile_document_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.CheckpointError, match=words):
        Reader(forged(tmp_path, **changes)).read_metadata()


@pytest.mark.parametrize(
    "value",
    [
        {"$": "array", "dtype": "<f4", "shape": [2], "base64": "AAAA"},
        {"$": "array", "dtype": "<f4", "shape": [2**61], "base64": "AAAA"},
        {"$": "array", "dtype": "|O", "shape": [1], "base64": "AAAAAAAAAAA="},
        {"$": "array"},
        {"$": "module", "tensors": []},
        {"$": "tensor", "g": "dcp", "n": "a.b"},
        {"$": "os.system"},
    ],
)
def test_a_hostile_value_is_refused(tmp_path: Path, value: object) -> None:
    path = forged(tmp_path, values={"n": value})
    with pytest.raises(BaseException, match="broken array|unknown kind|numpy dtype"):
        load(path, {"n": 0})
