from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lastcall.adapters.transformers import choosing
from lastcall.adapters.transformers.choosing import Chosen
from lastcall.core.checkpoint import record as records
from lastcall.core.checkpoint.record import Entry
from lastcall.types import Kind

# ---- which run it is ---------------------------------------------------------------------------------------

Make = Callable[..., Any]


def test_equal_scripts_are_the_same_run_wherever_they_write(make: Make, tmp_path: Path) -> None:
    one, other = (
        make(seed=3),
        make(seed=3, output_dir=str(tmp_path / "elsewhere"), save_steps=7, logging_steps=3),
    )
    with torch.no_grad():
        other.model.linear.weight.fill_(7.0)  # other values: it may have been trained already
    assert choosing.identity(one) == choosing.identity(other)


@pytest.mark.parametrize(
    "said",
    [
        {"seed": 4}, {"learning_rate": 1e-3}, {"max_steps": 3}, {"num_train_epochs": 9}, {"per_device_train_batch_size": 2},  # noqa: E501
        {"gradient_accumulation_steps": 2}, {"lr_scheduler_type": "cosine"}, {"optim": "sgd"}, {"weight_decay": 0.5}, {"data_seed": 1},  # noqa: E501
    ],
    ids=repr,
)  # fmt: skip
def test_another_training_is_another_run(make: Make, said: dict[str, Any]) -> None:
    assert choosing.identity(make(seed=3)) != choosing.identity(make(**{"seed": 3, **said}))


def pretend(model: torch.nn.Module | None, data: object) -> Any:
    return SimpleNamespace(args=SimpleNamespace(seed=1), model=model, train_dataset=data)


def test_another_model_or_other_data_are_another_run() -> None:
    class Endless:
        def __len__(self) -> int:
            raise TypeError("who knows")

    linear = torch.nn.Linear
    runs = [
        pretend(linear(2, 1), [1, 2]),
        pretend(linear(2, 2), [1, 2]),
        pretend(linear(2, 1, bias=False), [1, 2]),
        pretend(linear(2, 1, dtype=torch.bfloat16), [1, 2]),
        pretend(torch.nn.Sequential(linear(2, 1)), [1, 2]),
        pretend(linear(2, 1), [1]),
        pretend(linear(2, 1), Endless()),
        pretend(None, [1]),
    ]
    names = [choosing.identity(run) for run in runs]
    assert len(set(names)) == len(names)
    assert choosing.identity(pretend(linear(2, 1), None)) == choosing.identity(
        pretend(linear(2, 1), iter([]))
    )
    assert choosing.identity(pretend(linear(2, 1), [3, 4])) == names[0]


def test_a_name_that_was_given_decides_alone() -> None:
    one, other = pretend(torch.nn.Linear(2, 1), [1]), pretend(None, None)
    assert (
        choosing.identity(one, "exp1") == choosing.identity(other, "exp1") != choosing.identity(one, "exp2")
    )
    assert (
        choosing.identity(one, "")
        == choosing.identity(one, None)
        == choosing.identity(one)
        != choosing.identity(one, "exp1")
    )


# ---- where it goes on --------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def entry(root: Path, step: int = 5) -> Entry:
    path = root / f"checkpoint-{step}"
    path.mkdir()
    record = records.Record(1, step, Kind.JIT, "test", True, ())
    (path / records.NAME).write_bytes(record.to_json())
    return Entry(path, record)


def theirs(root: Path, step: int) -> Path:
    """A checkpoint as Hugging Face writes it."""
    path = root / f"checkpoint-{step}"
    path.mkdir()
    save_file({"w": torch.ones(100)}, path / "model.safetensors")
    torch.save({"a": torch.ones(100)}, path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def choose(root: Path, found: Entry | None, wanted: Any, origin: str = "") -> Chosen:
    ledger = None if found is None else {"origin": origin}
    return choosing.choose(SimpleNamespace(_get_output_dir=lambda trial: str(root)), found, ledger, wanted)


@pytest.mark.parametrize("wanted", [None, True, False])
def test_the_newest_of_this_run_is_gone_on_from_whether_or_not_the_script_says_so(
    root: Path, wanted: bool | None
) -> None:
    ours = entry(root)
    assert choose(root, ours, wanted) == Chosen(str(ours.path), True, "")
    assert choose(root, ours, wanted, origin="a/checkpoint-1") == Chosen(
        str(ours.path), True, "a/checkpoint-1"
    )


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_that_the_script_names_is_taken_at_first(
    root: Path, tmp_path: Path, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lastcall"):
        named = str(tmp_path / "other" / "checkpoint-3")
        assert choose(root, None, kind(named)) == Chosen(named, False, named)
        assert choose(root, entry(root), kind(named)) == Chosen(named, False, named)
    assert f"Resuming from {named}, as the script asks" in caplog.text


def test_a_run_that_began_there_goes_on_from_its_own(root: Path) -> None:
    ours = entry(root)
    assert choose(root, ours, "base/checkpoint-3", origin="base/checkpoint-3") == Chosen(
        str(ours.path), True, "base/checkpoint-3"
    )
    assert not choose(root, ours, "base/checkpoint-4", origin="base/checkpoint-3").ours


def test_our_own_newest_by_its_path_is_ours(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = entry(root)
    assert choose(root, ours, str(ours.path)) == Chosen(str(ours.path), True, str(ours.path))
    monkeypatch.chdir(root.parent)
    assert choose(root, ours, "out/checkpoint-5").ours


def test_where_nothing_is_nothing_is_resumed(root: Path) -> None:
    assert [choose(root, None, wanted) for wanted in (None, True, False)] == [Chosen(None)] * 3
    assert choose(root / "not there", None, True) == Chosen(None)


def test_what_others_wrote_is_gone_on_from_only_where_the_script_says_so(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs(root, 9)
    newest = theirs(root, 10)
    with caplog.at_level(logging.INFO, "lastcall"):
        assert choose(root, None, True) == Chosen(str(newest))
        assert choose(root, None, None) == Chosen(None)
    assert "Resuming from checkpoint-10, which was not written by lastcall" in caplog.text
    assert "Pass resume_from_checkpoint=True to resume from it" in caplog.text


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


TORN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "sentinel": (lambda path: (path / records.SENTINEL).touch(), "it was never completed"),
    "no state": (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json cannot be read"),
    "torn state": (
        lambda path: (path / "trainer_state.json").write_text('{"global'),
        "trainer_state.json cannot be read",
    ),
    "empty state": (
        lambda path: (path / "trainer_state.json").write_text(""),
        "trainer_state.json cannot be read",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "it has no weights"),
    "torn weights": (lambda path: _cut(path / "model.safetensors"), "a file is damaged"),
    "empty weights": (lambda path: (path / "model.safetensors").write_bytes(b""), "a file is damaged"),
    "torn optimizer": (lambda path: _cut(path / "optimizer.pt"), "a file is damaged"),
    "empty optimizer": (lambda path: (path / "optimizer.pt").write_bytes(b""), "a file is damaged"),
}


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_one_is_passed_over_and_the_one_before_is_taken(
    root: Path, torn: str, caplog: pytest.LogCaptureFixture
) -> None:
    tear, why = TORN[torn]
    good = theirs(root, 9)
    tear(theirs(root, 10))
    assert choose(root, None, True) == Chosen(str(good))
    assert f"Skipping checkpoint-10: {why}" in caplog.text


def test_where_all_are_torn_nothing_is_resumed(root: Path) -> None:
    for step in (1, 2):
        (theirs(root, step) / "trainer_state.json").unlink()
    assert choose(root, None, True) == Chosen(None)


def test_what_only_looks_like_a_checkpoint_is_not_looked_at(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry(root, 50)  # of another run of ours
    (root / "checkpoint-60").touch()
    for name in ("checkpoint-x", "checkpoint-", "checkpoint-²", "checkpoint-70.replaced-0"):
        (root / name).mkdir()
    assert choose(root, None, True) == Chosen(None)
    good = theirs(root, 7)
    assert choose(root, None, True) == Chosen(str(good))
    assert "Skipping" not in caplog.text


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.safetensors"])
def test_weights_have_several_names(root: Path, name: str) -> None:
    path = theirs(root, 3)
    if name.endswith(".bin"):
        (path / "model.safetensors").unlink()
        stream = io.BytesIO()
        torch.save({}, stream)
        (path / name).write_bytes(stream.getvalue())
    else:
        (path / "model.safetensors").rename(path / name)
    assert choose(root, None, True) == Chosen(str(path))
