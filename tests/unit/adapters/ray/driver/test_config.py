from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.train import RunConfig as RaysOwn

import lastcall
from lastcall.adapters.ray import internals
from lastcall.adapters.ray.callback import JITCallback
from lastcall.adapters.ray.driver import config as configs
from lastcall.adapters.ray.driver import patch, run_name
from lastcall.auto import alias
from lastcall.ray import JITCheckpointConfig, RunConfig

SEEDED = "ray.train._internal.jit_checkpoint_config"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "LASTCALL_ENABLED",
        "RAY_TRAIN_JIT_CHECKPOINT_ENABLED",
        "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT",
    ):
        monkeypatch.delenv(name, raising=False)


def made(**given: object) -> tuple[RunConfig, list[JITCallback]]:
    with pytest.warns(DeprecationWarning, match="RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1"):
        config = RunConfig(name="exp", jit_checkpoint_config=JITCheckpointConfig(**given))  # type: ignore[arg-type]
    return config, [callback for callback in config.callbacks if isinstance(callback, JITCallback)]


def test_it_is_rays_own_with_one_argument_more() -> None:
    config, callbacks = made(enabled=True, kill_wait=7.0)
    assert isinstance(config, RaysOwn) and config.name == "exp"
    assert [callback._jit.kill_wait for callback in callbacks] == [7.0]


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT", "5.0")
    assert [callback._jit.kill_wait for callback in made(enabled=True, kill_wait=7.0, grace=60.0)[1]] == [5.0]
    monkeypatch.setenv("RAY_TRAIN_JIT_CHECKPOINT_ENABLED", "0")
    assert made(enabled=True)[1] == []


def test_switched_off_in_code_it_does_nothing() -> None:
    assert made(enabled=False)[1] == []


def test_without_the_argument_nothing_is_added_and_nothing_said() -> None:
    assert RunConfig(name="exp").callbacks == []


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a script gets that imports the module of the announcement; Ray's classes are as they were
    afterwards."""
    trainer = importlib.import_module("ray.train.v2.api.data_parallel_trainer").DataParallelTrainer
    monkeypatch.setattr(RaysOwn, "__init__", RaysOwn.__init__)
    monkeypatch.setattr(trainer, "_create_default_callbacks", trainer._create_default_callbacks)
    spec = alias.spec(SEEDED)
    assert spec is not None
    return importlib.util.module_from_spec(spec), spec.loader


def test_e1_rays_own_runconfig_takes_the_argument_once_the_announced_module_is_imported(seeded: Any) -> None:
    module, loader = seeded
    loader.exec_module(module)
    with pytest.warns(DeprecationWarning, match="RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1"):
        config = RaysOwn(
            name="exp", jit_checkpoint_config=module.JITCheckpointConfig(enabled=True, kill_wait=5.0)
        )
    assert [callback._jit.kill_wait for callback in config.callbacks] == [5.0]
    assert config.jit_checkpoint_config.kill_wait == 5.0
    assert RaysOwn(name="exp").jit_checkpoint_config is None and RaysOwn(name="exp").callbacks == []
    with pytest.raises(TypeError, match="JITCheckpointConfig\\(enabled=True\\)"):
        RaysOwn(jit_checkpoint_config={"enabled": True})


def test_e1_rays_own_runconfig_takes_the_argument_with_our_own_classes_too() -> None:
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        config = RaysOwn(jit_checkpoint_config=lastcall.JITCheckpointConfig(kill_wait=5.0))
    assert [callback._jit.kill_wait for callback in config.callbacks] == [5.0]


def test_e1_the_environment_wins_over_both(seeded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, loader = seeded
    loader.exec_module(module)
    monkeypatch.setenv("RAY_TRAIN_JIT_CHECKPOINT_ENABLED", "1")
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        assert len(RaysOwn(jit_checkpoint_config=module.JITCheckpointConfig(enabled=False)).callbacks) == 1
    monkeypatch.setenv("RAY_TRAIN_JIT_CHECKPOINT_ENABLED", "0")
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        assert RaysOwn(jit_checkpoint_config=module.JITCheckpointConfig(enabled=True)).callbacks == []


def test_e1_a_run_that_did_not_ask_is_left_alone_although_another_one_did(seeded: Any) -> None:
    module, loader = seeded
    loader.exec_module(module)
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        RaysOwn(name="one", jit_checkpoint_config=module.JITCheckpointConfig(enabled=True))
    backend = SimpleNamespace(backend_cls=SimpleNamespace(has_replica_groups=False))
    other = SimpleNamespace(
        run_config=RaysOwn(name="other"), backend_config=backend, train_loop_per_worker=made
    )
    assert patch.prepare(other) == []


def test_e1_the_module_is_there_without_any_variable_and_nothing_of_lastcall_before() -> None:
    source = (
        "import sys, ray.train\n"
        "print([name for name in sys.modules if name.startswith('lastcall')])\n"
        f"from {SEEDED} import JITCheckpointConfig\n"
        "print(JITCheckpointConfig(True).enabled, "
        "ray.train.RunConfig(jit_checkpoint_config=None).callbacks)\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LASTCALL", "RAY_"))}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.stdout.splitlines() == ["[]", "True []"], done.stderr


def test_e2_it_is_off_by_default_in_ray_as_announced_and_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (JITCheckpointConfig().enabled, JITCheckpointConfig().kill_wait) == (False, 3.0)
    assert lastcall.JITCheckpointConfig().enabled and isinstance(
        JITCheckpointConfig(), lastcall.JITCheckpointConfig
    )
    with pytest.warns(UserWarning, match="Pass enabled=True"):
        assert made(kill_wait=7.0)[1] == []
    monkeypatch.setenv("RAY_TRAIN_JIT_CHECKPOINT_ENABLED", "1")
    assert JITCheckpointConfig().enabled and len(made(kill_wait=7.0)[1]) == 1


def test_a_configuration_travels_in_its_runconfig() -> None:
    config = pickle.loads(cloudpickle.dumps(made(enabled=True, kill_wait=7.0)[0]))
    assert config.jit_checkpoint_config == configs.JITCheckpointConfig(enabled=True, kill_wait=7.0)


def test_e8_tune_hands_our_variables_on_to_its_trials_but_not_what_each_has_for_itself() -> None:
    cache = importlib.import_module("ray.tune.execution.class_cache")
    found = SimpleNamespace(ENV_VARS_TO_PROPAGATE=set(cache.ENV_VARS_TO_PROPAGATE))
    importlib.import_module("lastcall.adapters.ray.driver.tune").hand_on(found)
    assert {
        "RAY_TRAIN_JIT_CHECKPOINT_ENABLED",
        "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT",
        "LASTCALL_ENABLED",
    } <= found.ENV_VARS_TO_PROPAGATE
    assert found.ENV_VARS_TO_PROPAGATE > cache.ENV_VARS_TO_PROPAGATE
    assert not {"LASTCALL_RUN_ID", "LASTCALL_STOP_FILE"} & found.ENV_VARS_TO_PROPAGATE


def test_e8_two_trials_of_one_job_are_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(name="ray_train_run-2026-11-15_20-44-32")
    monkeypatch.setattr(run_name, "_runs", iter([1]))
    run_name.pin(config, "exp1", {}, trial="a1b2_00001")
    assert config.name == "exp1-a1b2_00001"
    assert internals.trial() == ""
