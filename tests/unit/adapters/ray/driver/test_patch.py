from __future__ import annotations

import linecache
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.callback import JITCallback
from lastcall.adapters.ray.driver import patch, run_name, versions
from lastcall.settings import JITCheckpointConfig


def train_loop() -> None:
    """The script is elsewhere."""


class Trainer:
    """As much of Ray's as is touched."""

    backend_config = SimpleNamespace(backend_cls=SimpleNamespace(has_replica_groups=False))

    def __init__(self, *callbacks: Any) -> None:
        self.run_config = SimpleNamespace(name="exp", callbacks=list(callbacks))
        self.train_loop_per_worker = train_loop

    def _create_default_callbacks(self) -> list[Any]:
        return ["rays own"]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTCALL_ENABLED", "1")
    monkeypatch.delenv(internals.DRAIN_VARIABLE, raising=False)


@pytest.fixture
def patched() -> type[Trainer]:
    kind = type("Patched", (Trainer,), {"_create_default_callbacks": Trainer._create_default_callbacks})
    module: Any = ModuleType("data_parallel_trainer")
    module.DataParallelTrainer = kind
    patch.protect_all(module)
    patch.protect_all(module)  # once is enough
    return kind


def test_one_callback_is_added_to_rays_own(patched: type[Trainer]) -> None:
    first, ours = patched()._create_default_callbacks()
    assert first == "rays own" and isinstance(ours, JITCallback)


def test_one_that_runconfig_has_brought_is_not_doubled(patched: type[Trainer]) -> None:
    brought = JITCallback.of(JITCheckpointConfig())
    assert patched(brought)._create_default_callbacks() == ["rays own"]
    assert __file__ in brought.sources


def test_the_script_travels_along_for_machines_that_do_not_have_it(patched: type[Trainer]) -> None:
    _, ours = patched()._create_default_callbacks()
    copy = cloudpickle.loads(cloudpickle.dumps(ours))
    assert copy.sources == ours.sources and "The script is elsewhere" in copy.sources[__file__]


def test_a_train_worker_reads_the_script_that_came_along(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"host": "127.0.0.1", "port": 1, "secret": "", "incarnation": 1}
    monkeypatch.setattr(
        "lastcall.adapters.ray.worker.worker.TrainWorker", lambda *_: SimpleNamespace(begin=lambda: None)
    )
    JITCallback({"enabled": True}, place, {"/elsewhere/train.py": "first = 1\n"}).after_init_train_context()
    assert linecache.getline("/elsewhere/train.py", 1) == "first = 1\n"
    del linecache.cache["/elsewhere/train.py"]


def test_switched_off_nothing_is_added(patched: type[Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTCALL_ENABLED", "0")
    assert patched()._create_default_callbacks() == ["rays own"]
    assert internals.DRAIN_VARIABLE not in os.environ


def test_replica_groups_are_left_to_their_own_way_of_going_on(
    patched: type[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = patched()
    trainer.backend_config = SimpleNamespace(backend_cls=SimpleNamespace(has_replica_groups=True))
    assert trainer._create_default_callbacks() == ["rays own"] and "TorchFT" in caplog.text


def test_a_mirror_is_rays_own_matter(
    patched: type[Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LASTCALL_MIRROR", "s3://runs/exp1")
    patched()._create_default_callbacks()
    assert "LASTCALL_MIRROR is ignored" in caplog.text


def test_what_fails_here_leaves_the_run_unprotected_and_does_not_end_it(
    patched: type[Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(run_name, "pin", fail)
    assert patched()._create_default_callbacks() == ["rays own"]
    assert "not protected: OSError: no" in caplog.text


def test_a_wrong_setting_leaves_the_run_unprotected_and_says_which(
    patched: type[Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT", "soon")
    assert patched()._create_default_callbacks() == ["rays own"]
    assert "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT='soon'" in caplog.text


def test_ray_looks_for_drained_nodes_every_second_unless_somebody_has_said_otherwise(
    patched: type[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(internals.DRAIN_VARIABLE, "0.3")
    patched()._create_default_callbacks()
    assert os.environ[internals.DRAIN_VARIABLE] == "0.3"
    monkeypatch.delenv(internals.DRAIN_VARIABLE)
    patched()._create_default_callbacks()
    assert os.environ[internals.DRAIN_VARIABLE] == "1.0"
    monkeypatch.delenv(internals.DRAIN_VARIABLE)


def test_a_ray_that_is_too_old_is_left_alone(patched: type[Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "supported", lambda text: False)
    assert patched()._create_default_callbacks() == ["rays own"]
