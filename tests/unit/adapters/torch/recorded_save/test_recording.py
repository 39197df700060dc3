from __future__ import annotations

import gc
import os
import pickle
import random
import shutil
import sys
import threading
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from helpers.models.roundtrip import read
from lastcall import errors
from lastcall.adapters.torch.recorded_save import diverting, recording
from lastcall.adapters.torch.recorded_save.recording import Recorder
from lastcall.formats import layouts


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left_in_place() -> Iterator[None]:
    before = torch.save, torch.serialization.save, safetensors.torch.save_file
    yield
    assert before == (torch.save, torch.serialization.save, safetensors.torch.save_file)
    assert diverting._users == 0 and not diverting._takers()


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Recorder], Path]:
    """Writes what was recorded into a folder of its own."""

    def write(recorder: Recorder) -> Path:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        for layout in recorder.files():
            (out / layout.name).parent.mkdir(parents=True, exist_ok=True)
            (out / layout.name).write_bytes(layouts.materialize(layout))
        return out

    return write


def names(recorder: Recorder) -> list[str]:
    return [layout.name for layout in recorder.files()]


def records(path: Path) -> dict[str, bytes]:
    """What is in a .pt file, without its folder and its serialization id."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        data = path.read_bytes()
        found = {}
        for info in archive.infolist():  # by hand: the checksums of large files are not filled in
            begin = (
                info.header_offset
                + 30
                + sum(int.from_bytes(data[info.header_offset + at :][:2], "little") for at in (26, 28))
            )
            found[info.filename.split("/", 1)[1]] = data[begin : begin + info.file_size]
    return {name: content for name, content in found.items() if "serialization_id" not in name}


def adamw() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


BASE = torch.arange(24.0)
PICKLES: dict[str, Callable[[], object]] = {
    "an optimizer": lambda: adamw()[1].state_dict(),
    "a model": lambda: adamw()[0].state_dict(),
    "parameters": lambda: [
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.randn(3), requires_grad=False),
    ],
    "requires grad": lambda: torch.randn(3, requires_grad=True),
    "views of one storage": lambda: [BASE, BASE[3:9], BASE.view(4, 6).t()],
    "empty and zero-dimensional": lambda: [torch.zeros(0), torch.zeros(2, 0, 3), torch.tensor(7)],
    "half types": lambda: {
        "a": torch.randn(9).bfloat16(),
        "b": torch.randn(9).half(),
        "c": torch.randn(9).to(torch.float8_e4m3fn),
    },
    "sparse": lambda: torch.eye(4).to_sparse(),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "an untyped storage": lambda: torch.arange(5).untyped_storage(),
    "no tensors": lambda: {"base_lrs": [0.1], "last_epoch": 3, "f": None},
    "random states": lambda: {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    },
    "classes": lambda: OrderedDict(path=Path("a"), scalar=np.float64(3.0), error=errors.StateError("x")),
}


@pytest.mark.parametrize("what", PICKLES)
def test_a_recorded_pickle_holds_what_torch_save_would_have_written(
    what: str, scratch: Path, tmp_path: Path, written: Callable[[Recorder], Path]
) -> None:
    value = PICKLES[what]()
    with Recorder(scratch) as recorder:
        torch.save(value, scratch / "a.pt")
    torch.save(value, tmp_path / "theirs.pt")
    assert (scratch / "a.pt").stat().st_size < 100
    assert records(written(recorder) / "a.pt") == records(tmp_path / "theirs.pt")
    torch.load(tmp_path / "out" / "a.pt", weights_only=False)


def test_a_recorded_optimizer_loads_as_plain_weights_with_its_steps(
    scratch: Path, written: Callable[[Recorder], Path]
) -> None:
    _, optimizer = adamw()
    with Recorder(scratch) as recorder:
        torch.save(optimizer.state_dict(), os.path.join(scratch, "optimizer.pt"))
    for mapped in (False, True):
        loaded = torch.load(written(recorder) / "optimizer.pt", weights_only=True, mmap=mapped)
        assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]
        for index, state in optimizer.state_dict()["state"].items():
            assert state["step"] == 3
            assert all(torch.equal(loaded["state"][index][key], value) for key, value in state.items())


def test_the_live_values_are_read_when_the_file_is_written(
    scratch: Path, written: Callable[[Recorder], Path]
) -> None:
    tensor = torch.zeros(3)
    with Recorder(scratch) as recorder:
        torch.save(tensor, scratch / "a.pt")
        safetensors.torch.save_file({"a": tensor}, scratch / "a.safetensors")
    tensor.fill_(5)
    out = written(recorder)
    assert torch.load(out / "a.pt", weights_only=True).tolist() == [5, 5, 5]
    assert safetensors.torch.load_file(out / "a.safetensors")["a"].tolist() == [5, 5, 5]


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_safetensors_file_has_the_bytes_of_every_dtype(
    dtype: torch.dtype, scratch: Path, written: Callable[[Recorder], Path]
) -> None:
    tensor = torch.tensor([0, 1] * 48, dtype=torch.uint8).view(dtype)
    with Recorder(scratch) as recorder:
        safetensors.torch.save_file({"a": tensor}, scratch / "a.safetensors", {"format": "pt"})
    path = written(recorder) / "a.safetensors"
    loaded = safetensors.torch.load_file(path)["a"]
    assert loaded.dtype == dtype and torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_tensors_of_any_layout_are_taken(scratch: Path, written: Callable[[Recorder], Path]) -> None:
    tied = torch.nn.Parameter(torch.randn(4, 6))
    found = {
        "transposed": torch.randn(7, 5).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "one": tied,
        "two": tied,
        "slice": tied[1:3],
    }
    with Recorder(scratch) as recorder:
        safetensors.torch.save_file(found, scratch / "a.safetensors")
    loaded = safetensors.torch.load_file(written(recorder) / "a.safetensors")
    assert loaded.keys() == found.keys()
    assert all(
        loaded[key].shape == value.shape and torch.equal(loaded[key], value) for key, value in found.items()
    )
    assert [(file, key) for file, key, _ in recorder.tensors()] == [("a.safetensors", key) for key in found]
    assert all(tensor is found[key] for _, key, tensor in recorder.tensors())


def test_what_cannot_be_recorded_is_the_business_of_the_function_itself(scratch: Path) -> None:
    base = torch.arange(4.0)
    with Recorder(scratch) as recorder:
        with pytest.raises(RuntimeError, match="different types"):
            torch.save([base, base.view(torch.int32)], scratch / "a.pt")
        with pytest.raises(ValueError, match="sparse"):
            safetensors.torch.save_file({"a": torch.eye(3).to_sparse()}, scratch / "a.safetensors")
        with pytest.raises(ValueError, match="expected torch.Tensor"):
            safetensors.torch.save_file({"a": 3}, scratch / "a.safetensors")  # type: ignore[dict-item]
        with pytest.raises(RuntimeError, match="Parent directory"):
            torch.save(base, scratch / "nowhere" / "a.pt")
        with pytest.raises((AttributeError, pickle.PicklingError)):
            torch.save(lambda: None, scratch / "b.pt")
        torch.save(torch.zeros(3, device="meta"), scratch / "meta.pt")
        torch.save(base, scratch / "old.pt", _use_new_zipfile_serialization=False)
        with (scratch / "open.pt").open("wb") as file:
            torch.save(base, file)
    assert {"meta.pt", "old.pt", "open.pt"} <= set(names(recorder))
    assert torch.equal(torch.load(scratch / "old.pt", weights_only=True), base)
    assert torch.equal(torch.load(scratch / "open.pt", weights_only=True), base)


def test_paths_elsewhere_are_written_as_ever(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch-too").mkdir()
    with Recorder(scratch) as recorder:
        torch.save(torch.ones(2), tmp_path / "a.pt")
        torch.save(torch.ones(2), scratch / ".." / "scratch-too" / "a.pt")
        safetensors.torch.save_file({"a": torch.ones(2)}, str(tmp_path / "a.safetensors"))
    assert names(recorder) == []
    assert torch.load(tmp_path / "a.pt", weights_only=True).tolist() == [1, 1]
    assert torch.load(tmp_path / "scratch-too" / "a.pt", weights_only=True).tolist() == [1, 1]
    assert safetensors.torch.load_file(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]


def test_paths_are_known_through_links_and_from_the_working_folder(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(scratch)
    monkeypatch.chdir(scratch)
    with Recorder(tmp_path / "link") as recorder:
        torch.save(torch.ones(2), tmp_path / "link" / "a.pt")
        torch.save(torch.ones(2), "b.pt")
        torch.save(torch.ones(2), b"c.pt")
        os.mkdir("deep")
        safetensors.torch.save_file({"a": torch.ones(2)}, "deep/d.safetensors")
    assert names(recorder) == ["a.pt", "b.pt", "c.pt", "deep/d.safetensors"]
    assert all((scratch / name).stat().st_size < 100 for name in names(recorder))


def test_files_are_followed_through_renames_copies_and_removals(
    scratch: Path, written: Callable[[Recorder], Path]
) -> None:
    with Recorder(scratch) as recorder:
        for number, name in enumerate(("a.tmp", "copied.pt", "removed.pt", "overwritten.pt", "twice.pt")):
            torch.save(torch.tensor(number), scratch / name)
        os.replace(scratch / "a.tmp", scratch / "a.pt")
        shutil.copy(scratch / "copied.pt", scratch / "copy.pt")
        (scratch / "removed.pt").unlink()
        (scratch / "overwritten.pt").write_bytes(b"text")
        torch.save(torch.tensor(7), scratch / "twice.pt")
    out = written(recorder)
    assert sorted(path.name for path in out.iterdir()) == [
        "a.pt",
        "copied.pt",
        "copy.pt",
        "overwritten.pt",
        "twice.pt",
    ]
    loaded = {
        name: torch.load(out / name, weights_only=True).item()
        for name in ("a.pt", "copied.pt", "copy.pt", "twice.pt")
    }
    assert loaded == {"a.pt": 0, "copied.pt": 1, "copy.pt": 1, "twice.pt": 7}
    assert (out / "overwritten.pt").read_bytes() == b"text"


def test_other_files_are_taken_as_they_lie_there(
    scratch: Path, written: Callable[[Recorder], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SMALL", 1000)
    big = random.Random(0).randbytes(5000)
    with Recorder(scratch) as recorder:
        (scratch / "config.json").write_text("{}")
        (scratch / "empty").touch()
        (scratch / "deep" / "deeper").mkdir(parents=True)
        (scratch / "deep" / "deeper" / "big.bin").write_bytes(big)
    files = {layout.name: layout for layout in recorder.files()}
    shutil.rmtree(scratch)
    assert list(files) == ["config.json", "deep/deeper/big.bin", "empty"]
    assert layouts.materialize(files["config.json"]) == b"{}"
    assert files["empty"].size == 0 and files["empty"].extents == ()
    source = files["deep/deeper/big.bin"].extents[0].source
    assert isinstance(source, recording.FileSource)
    assert read(source, 77) == big == layouts.materialize(files["deep/deeper/big.bin"])


def test_a_large_file_that_was_cut_off_is_said_and_its_descriptor_closed(scratch: Path) -> None:
    path = scratch / "a"
    path.write_bytes(bytes(100))
    source = recording.FileSource(path)
    os.truncate(path, 50)
    with pytest.raises(errors.StateError, match="ends at byte 50, but it had 100"):
        read(source, 100)
    fd = source._fd
    del source
    gc.collect()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def test_aliases_in_other_modules_are_found_and_put_back(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, early, save, save_file = (
        ModuleType("late"),
        ModuleType("early"),
        torch.save,
        safetensors.torch.save_file,
    )
    early.keep, early.other = save_file, save  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "early", early)
    with Recorder(scratch) as recorder:
        early.keep({"a": torch.ones(2)}, scratch / "a.safetensors")
        early.other(torch.ones(2), scratch / "a.pt")
        late.save = torch.save  # type: ignore[attr-defined]  # imported while it is in place
    assert early.keep is save_file and early.other is save
    assert all((scratch / name).stat().st_size < 100 for name in names(recorder))
    late.save(torch.ones(2), scratch / "b.pt")
    assert (scratch / "b.pt").stat().st_size > 100
    monkeypatch.setitem(sys.modules, "late", late)
    with Recorder(scratch):
        late.save(torch.ones(2), scratch / "b.pt")
    assert (scratch / "b.pt").stat().st_size < 100 and late.save is save


def test_what_somebody_else_put_in_the_place_meanwhile_stays(scratch: Path) -> None:
    save = torch.save
    try:
        with Recorder(scratch) as recorder:
            ours = torch.save
            torch.save = theirs = lambda *args: ours(*args)
            torch.save(torch.ones(2), scratch / "a.pt")
        assert torch.save is theirs and names(recorder) == ["a.pt"]
        torch.save(torch.ones(2), scratch / "a.pt")
        assert (scratch / "a.pt").stat().st_size > 100
    finally:
        torch.save = save


def test_an_exception_inside_leaves_everything_as_it_was(scratch: Path) -> None:
    save = torch.save
    with pytest.raises(KeyError), Recorder(scratch):
        assert torch.save is not save
        raise KeyError
    assert torch.save is save


def test_only_the_thread_that_entered_is_recorded(scratch: Path, tmp_path: Path) -> None:
    def work(number: int) -> None:
        mine = tmp_path / str(number)
        mine.mkdir()
        here.wait()
        with Recorder(mine) as recorder:
            here.wait()  # all are inside
            torch.save(torch.tensor(number), mine / "a.pt")
            torch.save(torch.tensor(number), scratch / f"{number}.pt")
        found[number] = recorder

    here, found = threading.Barrier(3, timeout=30), dict[int, Recorder]()
    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    with Recorder(scratch) as recorder:
        here.wait()
        here.wait()
        for thread in threads:
            thread.join(30)
        torch.save(torch.tensor(0), scratch / "0.pt")
    assert {layout.name: layout.size > 100 for layout in recorder.files()} == {
        "0.pt": True,
        "1.pt": True,
        "2.pt": True,
    }
    assert (scratch / "0.pt").stat().st_size < 100 < (scratch / "1.pt").stat().st_size
    assert all(
        names(one) == ["a.pt"] and (one.scratch / "a.pt").stat().st_size < 100 for one in found.values()
    )


def test_the_tensors_live_as_long_as_the_layouts_and_no_longer(scratch: Path) -> None:
    tensor, other = torch.ones(1000), torch.ones(1000)
    gone = [weakref.ref(tensor.untyped_storage()), weakref.ref(other)]
    with Recorder(scratch) as recorder:
        torch.save({"a": tensor}, scratch / "a.pt")
        safetensors.torch.save_file({"a": other}, scratch / "a.safetensors")
    files = recorder.files()
    del tensor, other, recorder
    ones = torch.ones(1000).numpy().tobytes()
    assert all(ones in layouts.materialize(layout) for layout in files)
    gc.disable()  # without its help: tensors on a device must not wait for it
    try:
        del files
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def tiny(transformers: Any) -> Any:
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config)


def trained(transformers: Any, folder: Path, model: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=2,
        disable_tqdm=True,
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return trainer


def test_a_checkpoint_of_a_trainer_is_recorded_and_loads(
    transformers: Any, scratch: Path, tmp_path: Path, written: Callable[[Recorder], Path]
) -> None:
    model = tiny(transformers)
    trainer = trained(transformers, tmp_path / "run", model)
    trainer.args.output_dir = str(scratch)
    with Recorder(scratch) as recorder:
        trainer._save_checkpoint(model, None)
    trainer.args.output_dir = str(tmp_path / "run")
    trainer._save_checkpoint(model, None)
    theirs, ours = tmp_path / "run" / "checkpoint-2", written(recorder) / "checkpoint-2"
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    assert sum(path.stat().st_size for path in (scratch / "checkpoint-2").iterdir()) < 10_000
    assert {key for _, key, _ in recorder.tensors()} == safetensors.torch.load_file(
        theirs / "model.safetensors"
    ).keys()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert records(ours / name) == records(theirs / name)
    again = transformers.GPT2LMHeadModel.from_pretrained(ours)
    assert all(
        torch.equal(one, two)
        for one, two in zip(again.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert again.lm_head.weight is again.transformer.wte.weight
    optimizer = torch.load(ours / "optimizer.pt", weights_only=True)
    assert {state["step"].item() for state in optimizer["state"].values()} == {2}
    trainer._load_optimizer_and_scheduler(str(ours))
    trainer._load_rng_state(str(ours))


def test_the_shards_of_a_large_model_are_recorded(
    transformers: Any, scratch: Path, written: Callable[[Recorder], Path]
) -> None:
    model = tiny(transformers).bfloat16()
    with Recorder(scratch) as recorder:
        model.save_pretrained(scratch, max_shard_size="4KB")
    shards = [name for name in names(recorder) if name.endswith(".safetensors")]
    assert len(shards) > 1 and all((scratch / name).stat().st_size < 100 for name in shards)
    again = transformers.GPT2LMHeadModel.from_pretrained(written(recorder), dtype=torch.bfloat16)
    assert all(
        torch.equal(one, two)
        for one, two in zip(again.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_the_adapter_of_a_peft_model_is_recorded(
    transformers: Any, scratch: Path, written: Callable[[Recorder], Path]
) -> None:
    import peft

    model = peft.get_peft_model(
        tiny(transformers), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    with Recorder(scratch) as recorder:
        model.save_pretrained(scratch)
    assert (scratch / "adapter_model.safetensors").stat().st_size < 100
    loaded = safetensors.torch.load_file(written(recorder) / "adapter_model.safetensors")
    assert loaded and all(torch.equal(loaded[key], tensor) for _, key, tensor in recorder.tensors())
