from __future__ import annotations

import pytest
from ray.train import RunConfig as RaysOwn

from lastcall.adapters.ray.callback import JITCallback
from lastcall.ray import JITCheckpointConfig, RunConfig


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LASTCALL_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_ENABLED", "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"):
        monkeypatch.delenv(name, raising=False)


def made(**given: object) -> tuple[RunConfig, list[JITCallback]]:
    with pytest.warns(DeprecationWarning, match="RAY_TRAIN_JIT_CHECKPOINT_ENABLED=1"):
        config = RunConfig(name="exp", jit_checkpoint_config=JITCheckpointConfig(**given))  # type: ignore[arg-type]
    return config, [callback for callback in config.callbacks if isinstance(callback, JITCallback)]


def test_it_is_rays_own_with_one_argument_more() -> None:
    config, callbacks = made(kill_wait=7.0)
    assert isinstance(config, RaysOwn) and config.name == "exp"
    assert [callback._jit.kill_wait for callback in callbacks] == [7.0]


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT", "5.0")
    assert [callback._jit.kill_wait for callback in made(kill_wait=7.0, grace=60.0)[1]] == [5.0]
    monkeypatch.setenv("RAY_TRAIN_JIT_CHECKPOINT_ENABLED", "0")
    assert made(enabled=True)[1] == []


def test_switched_off_in_code_it_does_nothing() -> None:
    assert made(enabled=False)[1] == []


def test_without_the_argument_nothing_is_added_and_nothing_said() -> None:
    assert RunConfig(name="exp").callbacks == []
