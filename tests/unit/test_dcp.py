"""lastcall.dcp in one process; with real ranks: tests/e2e/test_dcp.py."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import lastcall
from helpers.core.bare_core import flip
from lastcall import errors
from lastcall.adapters.torch.dcp import publishing, values
from lastcall.cli import main
from lastcall.core.checkpoint import record as records
from lastcall.dcp import Reader, Writer
from lastcall.storage import files as storage

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:torch.distributed is unavailable"
)


def model_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def zeroed(value: Any) -> Any:
    """The same state dict with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return [zeroed(item) for item in value] if isinstance(value, list) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(np.all(one == other))


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(path, threads=2, **options), no_dist=True)


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, storage_reader=Reader(path, threads=2), no_dist=True)
    return state


def failure(call: Callable[[], object]) -> str:
    """What DCP reports of an error: it wraps it in one of its own, which is no Exception."""
    with pytest.raises(BaseException) as caught:
        call()
    return str(caught.value)


def test_the_module_is_found_as_an_attribute() -> None:
    assert lastcall.dcp.Writer is Writer and lastcall.dcp.Reader is Reader


def test_a_state_dict_comes_back_as_it_was(tmp_path: Path) -> None:
    state = model_state()
    save(tmp_path / "made" / "on the way", state)
    assert same(load(tmp_path / "made" / "on the way", zeroed(state)), state)
    assert os.listdir(tmp_path / "made") == ["on the way"]


def test_nothing_is_pickled_and_every_file_is_in_the_record(tmp_path: Path) -> None:
    save(tmp_path / "c", model_state())
    record = records.read(tmp_path / "c")
    assert {file.name for file in record.files} == {
        "dcp-00000.safetensors",
        "manifest.json",
        "state-00000.json",
    }
    assert set(os.listdir(tmp_path / "c")) == {*(file.name for file in record.files), records.NAME}
    assert (record.world, record.complete, record.exact) == (1, True, True)
    for path in (tmp_path / "c").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_bytes())


def test_every_element_type_and_shape_comes_back(tmp_path: Path) -> None:
    plain = [
        torch.float64,
        torch.bfloat16,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e5m2fnuz,
    ]
    state = {str(dtype): torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype) for dtype in plain}
    state |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "expanded": torch.ones(3, 1).expand(3, 4),
        "__metadata__": torch.ones(2),
        "large": torch.randn(600_000),
    }
    save(tmp_path / "c", state)
    found = load(
        tmp_path / "c", {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    )
    for name, value in state.items():
        assert torch.equal(
            found[name].view(torch.uint8) if name == "torch.float8_e5m2fnuz" else found[name],
            value.view(torch.uint8) if name == "torch.float8_e5m2fnuz" else value,
        ), name


def test_values_keep_their_types(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "numbers": (1, 2.5, float("inf"), 2**70),
        "text": "a",
        "none": None,
        "bytes": b"\x00\xff",
        "numpy": np.random.RandomState(3).get_state(),
        "scalar": np.float32(1.5),
        "dtype": torch.bfloat16,
        "size": torch.Size((2, 3)),
        "no elements": np.zeros((0, 3)),
    }
    save(tmp_path / "c", state)
    found = load(tmp_path / "c", dict.fromkeys(state))
    for name in ("numbers", "text", "none", "bytes", "scalar", "dtype", "size"):
        assert found[name] == state[name] and type(found[name]) is type(state[name]), name
    assert found["no elements"].shape == (0, 3)
    assert all(np.array_equal(one, other) for one, other in zip(found["numpy"], state["numpy"], strict=True))


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), lambda: None, np.array([None]), {"a": Odd()}])
def test_a_value_that_needs_pickle_is_refused_by_its_key_and_nothing_is_left(
    tmp_path: Path, value: object
) -> None:
    said = failure(lambda: save(tmp_path / "c", {"outer": {"inner": value}}))
    assert "outer.inner" in said and "cannot be saved" in said
    assert not (tmp_path / "c").exists()


def test_a_planner_that_has_only_bytes_to_offer_is_refused(tmp_path: Path) -> None:
    class Bytes(DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]

    writer = Writer(tmp_path / "c")
    assert "lookup_object" in failure(
        lambda: dcp.save({"a": 1}, storage_writer=writer, planner=Bytes(), no_dist=True)
    )


def test_a_nested_tensor_inside_a_value_says_what_to_do(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    writer = Writer(tmp_path / "c")
    assert "flatten_state_dict=True" in failure(
        lambda: dcp.save({"a": {"b": torch.ones(1)}}, storage_writer=writer, planner=planner, no_dist=True)
    )


def test_without_collectives_it_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "c")
    assert "use_collectives" in failure(
        lambda: dcp.save({"a": 1}, storage_writer=writer, no_dist=True, use_collectives=False)
    )


def test_no_threads_at_all_are_refused(tmp_path: Path) -> None:
    for kind in (Writer, Reader):
        with pytest.raises(ValueError, match="threads=0"):
            kind(tmp_path, threads=0)


# ---- where it is written -----------------------------------------------------------------------------------


def test_a_checkpoint_that_is_there_is_replaced(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        save(tmp_path / "c", {"w": torch.full((3,), number)})
    assert load(tmp_path / "c", {"w": torch.zeros(3)})["w"].tolist() == [2.0] * 3
    assert os.listdir(tmp_path) == ["c"]


def test_it_is_replaced_also_where_two_names_cannot_be_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(storage.Files, "exchange", refuse)
    for number in (1.0, 2.0):
        save(tmp_path / "c", {"w": torch.full((3,), number)})
    assert load(tmp_path / "c", {"w": torch.zeros(3)})["w"].tolist() == [2.0] * 3
    assert os.listdir(tmp_path) == ["c"]


def test_it_stays_where_overwriting_is_not_allowed(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": torch.ones(3)})
    assert "overwrite" in failure(lambda: save(tmp_path / "c", {"w": torch.zeros(3)}, overwrite=False))
    assert load(tmp_path / "c", {"w": torch.zeros(3)})["w"].tolist() == [1.0] * 3


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link", {"w": torch.ones(3)})
    assert load(tmp_path / "real", {"w": torch.zeros(3)})["w"].tolist() == [1.0] * 3
    assert (tmp_path / "link").is_symlink()


def test_what_is_not_a_checkpoint_of_ours_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    (tmp_path / "run" / ".lastcall").mkdir(parents=True)
    assert "not empty" in failure(lambda: save(tmp_path / "folder", {"w": torch.ones(1)}))
    assert "is a file" in failure(lambda: save(tmp_path / "file", {"w": torch.ones(1)}))
    assert "checkpoints of a run" in failure(
        lambda: save(tmp_path / "run" / "checkpoint-5", {"w": torch.ones(1)})
    )
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "run"]


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    staged = publishing.stage(tmp_path / "c")
    other = publishing.stage(tmp_path / "other")
    (staged / "dcp-00000.safetensors").write_bytes(b"half")
    save(tmp_path / "c", {"w": torch.ones(1)})
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, "c"])
    assert "missing" in failure(lambda: load(other, {})) or "cannot be opened" in failure(
        lambda: load(other, {})
    )


def test_a_full_disk_says_so_and_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", {"w": torch.ones(3)})

    def full(self: object, fd: int, *more: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.Files, "truncate", full)
        assert "make room" in failure(lambda: save(tmp_path / "c", {"w": torch.zeros(3)}))
    assert load(tmp_path / "c", {"w": torch.zeros(3)})["w"].tolist() == [1.0] * 3


def test_one_writer_serves_many_checkpoints_and_can_be_sent_to_another_process(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "unused", threads=1)
    for name in ("a", "b"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / name, storage_writer=writer, no_dist=True)
        dcp.load(
            {"w": torch.ones(2)},
            checkpoint_id=tmp_path / name,
            storage_reader=Reader("nowhere"),
            no_dist=True,
        )
    assert pickle.loads(pickle.dumps(writer)).path == tmp_path / "b"
    assert Writer.validate_checkpoint_id(tmp_path) and not Writer.validate_checkpoint_id("s3://bucket")
    assert Reader.validate_checkpoint_id(tmp_path) and not Reader.validate_checkpoint_id("s3://bucket")


def test_async_save_writes_the_state_of_the_call(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}
    future: Any = dcp.async_save(state, storage_writer=Writer(tmp_path / "c", threads=2), no_dist=True)
    state["w"].zero_()
    future.result()
    assert load(tmp_path / "c", {"w": torch.zeros(1000)})["w"].sum() == 1000


@pytest.fixture
def no_plans_kept() -> Any:
    """DCP keeps cached plans in the class."""
    caches = (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    )
    for name in caches:
        getattr(SavePlanner, name).clear()
    yield
    for name in caches:
        getattr(SavePlanner, name).clear()


@pytest.mark.usefixtures("no_plans_kept")
def test_cached_plans_are_used_again(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((3,), number), "n": number}
        dcp.save(state, storage_writer=Writer(tmp_path / "c", threads=1), planner=planner, no_dist=True)
        assert same(load(tmp_path / "c", {"w": torch.zeros(3), "n": None}), state)


# ---- reading -----------------------------------------------------------------------------------------------


def test_another_element_type_is_converted_and_another_shape_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": torch.arange(6.0).reshape(2, 3)})
    assert load(tmp_path / "c", {"w": torch.zeros(2, 3, dtype=torch.bfloat16)})["w"].sum() == 15
    assert "Size mismatch" in failure(lambda: load(tmp_path / "c", {"w": torch.zeros(3, 2)}))
    assert "Missing key" in failure(lambda: load(tmp_path / "c", {"v": torch.zeros(2, 3)}))


def test_a_state_dict_is_made_from_the_checkpoint_alone(tmp_path: Path) -> None:
    state = model_state()
    save(tmp_path / "c", state)
    found = _load_state_dict_from_keys({"model"}, storage_reader=Reader(tmp_path / "c"))
    assert same(found, {"model": state["model"]})


def test_only_what_is_needed_is_read_but_its_digest_is_checked(tmp_path: Path) -> None:
    state = {"a": torch.randn(3_000_000), "b": torch.randn(3_000_000)}
    save(tmp_path / "c", state)
    flip(tmp_path / "c" / "dcp-00000.safetensors", -1)  # the last byte of b
    assert torch.equal(load(tmp_path / "c", {"a": torch.zeros(3_000_000)})["a"], state["a"])
    assert "do not match their digest" in failure(lambda: load(tmp_path / "c", {"b": torch.zeros(3_000_000)}))


@pytest.mark.parametrize("name", ["manifest.json", "state-00000.json", records.NAME])
def test_a_changed_small_file_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path / "c", {"w": torch.ones(3), "n": 1})
    flip(tmp_path / "c" / name, 30)
    assert "digest" in failure(lambda: load(tmp_path / "c", {"w": torch.zeros(3)}))


def test_the_commands_know_it_whatever_it_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = model_state()
    save(tmp_path / "step-7", state)
    for command in ("show", "verify"):
        assert main.main([command, str(tmp_path / "step-7")]) == 0
    assert "ok (" in capsys.readouterr().out
    for out in ("all.pt", "model.safetensors"):
        more = ["--name", "model"] if out.startswith("model") else []
        assert main.main(["export", str(tmp_path / "step-7"), str(tmp_path / out), *more]) == 0
    assert same(load_file(tmp_path / "model.safetensors"), dict(state["model"]))
    assert "optimizer.state.0.exp_avg" in torch.load(tmp_path / "all.pt", weights_only=True)
    flip(tmp_path / "step-7" / "dcp-00000.safetensors", -1)
    assert main.main(["verify", str(tmp_path / "step-7")]) == 1


# ---- E7: torch's own folders and tools ---------------------------------------------------------------------


def test_e7_a_bytesio_comes_back_with_its_bytes_and_its_place(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    state = {"saved": buffer, "begin": io.BytesIO(b"abc"), "nested": [io.BytesIO(), 1]}
    save(tmp_path / "c", state)
    found = load(tmp_path / "c", {"saved": None, "begin": None, "nested": [None, None]})
    assert found["saved"].getvalue() == buffer.getvalue() and found["saved"].tell() == buffer.tell()
    assert found["begin"].read() == b"abc" and found["nested"][0].getvalue() == b""
    assert torch.load(io.BytesIO(found["saved"].getvalue()), weights_only=True)["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "kept", [{}, {"base64": "!"}, {"base64": ""}, {"base64": "", "at": -1}, {"base64": "", "at": 2**70}]
)
def test_a_broken_bytesio_is_refused(kept: dict[str, object]) -> None:
    with pytest.raises(errors.CheckpointError, match="BytesIO"):
        values.decode({"$": "BytesIO", **kept})


def test_e7_a_file_is_refused_as_a_file_and_not_as_an_iterator(tmp_path: Path) -> None:
    with open(__file__) as file:
        said = failure(lambda: save(tmp_path / "c", {"log": file}))
    assert "log: a file (_io.TextIOWrapper) cannot be saved" in said and "iterator" not in said


def test_e7_torch_s_own_readers_are_told_which_reader_the_folder_needs(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": torch.ones(3)})
    for call in (
        lambda: dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "c", no_dist=True),
        lambda: format_utils.dcp_to_torch_save(tmp_path / "c", tmp_path / "out.pt"),
    ):
        said = failure(call)
        assert (
            "was written by lastcall" in said
            and f"lastcall.dcp.Reader('{tmp_path / 'c'}')" in said
            and "to_torch_save" in said
        )
    # torch's own words stay
    assert ".metadata" in failure(lambda: dcp.load({}, checkpoint_id=tmp_path / "nowhere", no_dist=True))


def test_e7_the_whole_state_dict_becomes_one_file_and_a_folder_of_torch_s_own(tmp_path: Path) -> None:
    state = {"model": model_state()["model"], "step": 7, "buffer": io.BytesIO(b"abc")}
    save(tmp_path / "c", state)
    lastcall.dcp.to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=False)
    assert found.pop("buffer").getvalue() == state.pop("buffer").getvalue() and same(found, state)
    format_utils.torch_save_to_dcp(tmp_path / "c.pt", tmp_path / "torch")
    again = zeroed(state)
    dcp.load(again, checkpoint_id=tmp_path / "torch", no_dist=True)
    assert same(again, state)


def test_e7_our_reader_says_whose_folder_it_is(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "torch", no_dist=True)
    said = failure(lambda: load(tmp_path / "torch", {"w": torch.zeros(3)}))
    assert "FileSystemWriter" in said and f"FileSystemReader('{tmp_path / 'torch'}')" in said
    (tmp_path / "run" / ".lastcall").mkdir(parents=True)
    assert f"lastcall ls {tmp_path / 'run'}" in failure(lambda: load(tmp_path / "run", {}))
    assert "is not there" in failure(lambda: load(tmp_path / "nowhere", {}))
    (tmp_path / "file").touch()
    assert "is a file" in failure(lambda: load(tmp_path / "file", {}))
