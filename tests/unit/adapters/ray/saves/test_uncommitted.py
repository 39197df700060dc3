from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import Checkpoint

from lastcall.adapters.ray.saves import uncommitted


@pytest.fixture
def made(storage: Any) -> Any:
    """A checkpoint of this name in the run's folder."""

    def make(name: str) -> Checkpoint:
        path = Path(storage.build_checkpoint_path_from_name(name))
        path.mkdir(parents=True)
        (path / "model.pt").write_bytes(b"weights")
        return Checkpoint(str(path), storage.storage_filesystem)

    return make


def test_what_was_left_is_handed_to_the_script_of_the_next_incarnation(
    storage: Any, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    known, left = made("checkpoint_1"), made("checkpoint_2")
    uncommitted.leave(storage, left, ["checkpoint_1"], {"reason": "SIGTERM"})
    context = SimpleNamespace(storage_context=storage, checkpoint=known)
    with caplog.at_level("INFO", "lastcall"):
        uncommitted.inject(context)
    assert context.checkpoint.path == left.path
    assert "checkpoint_2" in caplog.text and "SIGTERM" in caplog.text


def test_the_very_first_checkpoint_of_a_run_is_found_too(storage: Any, made: Any) -> None:
    left = made("checkpoint_1")
    uncommitted.leave(storage, left, [None], {})
    assert uncommitted.find(storage, None)[0].path == left.path


def test_nothing_is_handed_over_once_something_newer_was_committed(storage: Any, made: Any) -> None:
    uncommitted.leave(storage, made("checkpoint_2"), ["checkpoint_1"], {})
    assert uncommitted.find(storage, made("checkpoint_3"))[0] is None


def test_nothing_is_handed_over_that_ray_knows_by_itself(storage: Any, made: Any) -> None:
    left = made("checkpoint_2")
    uncommitted.leave(storage, left, ["checkpoint_1"], {})
    assert uncommitted.find(storage, left)[0] is None


def test_a_checkpoint_that_is_gone_is_not_handed_over(storage: Any, made: Any) -> None:
    left = made("checkpoint_2")
    uncommitted.leave(storage, left, [None], {})
    (Path(left.path) / "model.pt").unlink()
    Path(left.path).rmdir()
    assert uncommitted.find(storage, None)[0] is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 7}'])
def test_a_file_that_was_cut_off_names_nothing(storage: Any, text: str) -> None:
    uncommitted.write(storage, "uncommitted.json", {})
    Path(storage.experiment_fs_path, ".lastcall", "uncommitted.json").write_text(text)
    assert uncommitted.find(storage, None)[0] is None


def test_forgetting_twice_is_forgetting_once(storage: Any, made: Any) -> None:
    uncommitted.leave(storage, made("checkpoint_1"), [None], {})
    uncommitted.forget(storage)
    uncommitted.forget(storage)
    assert uncommitted.find(storage, None)[0] is None


def test_the_record_stands_beside_the_checkpoint_and_not_in_it(storage: Any, made: Any) -> None:
    checkpoint = made("checkpoint_1")
    uncommitted.record(storage, checkpoint, {"step": 7})
    assert [path.name for path in Path(checkpoint.path).iterdir()] == ["model.pt"]
    assert '"step": 7' in Path(storage.experiment_fs_path, ".lastcall", "checkpoint_1.json").read_text()


def test_a_state_is_no_checkpoint_and_a_checkpoint_is_no_state(storage: Any, made: Any) -> None:
    uncommitted.leave_state(storage, ".lastcall/state-1", [None], {})
    assert uncommitted.find(storage, None)[0] is None
    assert uncommitted.find_state(storage, None)[0] == ".lastcall/state-1"
    assert uncommitted.find_state(storage, made("checkpoint_1"))[0] is None
    uncommitted.leave(storage, made("checkpoint_2"), [None], {})
    assert uncommitted.find_state(storage, None)[0] is None


def test_states_of_former_incarnations_are_removed_when_a_newer_one_is_there(storage: Any) -> None:
    home = Path(storage.experiment_fs_path, ".lastcall")
    for name in ("state-1", "state-2", "other"):
        (home / name).mkdir(parents=True)
    uncommitted.clean(storage, "state-", ".lastcall/state-2")
    assert sorted(path.name for path in home.iterdir()) == ["other", "state-2"]


def test_b6_a_state_belongs_to_what_its_script_was_given(
    storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    was = uncommitted.arguments({"lr": 0.1, "key": "secret", "data": object()})
    uncommitted.leave_state(storage, ".lastcall/state-1", [None], {"reason": "SIGTERM"}, was)
    assert "secret" not in Path(storage.experiment_fs_path, ".lastcall", "uncommitted.json").read_text()
    assert (
        uncommitted.find_state(
            storage, None, uncommitted.arguments({"data": object(), "key": "secret", "lr": 0.1})
        )[0]
        is not None
    )
    assert (
        uncommitted.find_state(
            storage, None, uncommitted.arguments({"data": object(), "key": "secret", "lr": 0.2})
        )[0]
        is None
    )
    assert "train_loop_config has changed (`lr`)" in caplog.text and "RunConfig(name=...)" in caplog.text


def test_b6_a_checkpoint_of_the_script_itself_is_not_forgotten_with_the_states(
    storage: Any, made: Any
) -> None:
    uncommitted.leave(storage, made("checkpoint_1"), [None], {})
    uncommitted.forget_state(storage)
    assert uncommitted.find(storage, None)[0] is not None
