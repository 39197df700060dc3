from __future__ import annotations

import sys
from typing import Any

import pytest
from ray import cloudpickle
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerCallback

from lastcall.adapters.ray import callback
from lastcall.adapters.ray.callback import JITCallback
from lastcall.settings import JITCheckpointConfig


def test_the_settings_of_the_driver_travel_with_it_whatever_the_environment_says_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = cloudpickle.dumps(JITCallback.of(JITCheckpointConfig(kill_wait=7.0)))
    monkeypatch.setenv("LASTCALL_KILL_WAIT_SECONDS", "1")
    monkeypatch.setenv("LASTCALL_ENABLED", "0")
    copy = cloudpickle.loads(data)
    assert (copy._jit.kill_wait, copy._jit.enabled) == (7.0, True)


def test_where_lastcall_is_not_installed_the_copy_does_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = cloudpickle.dumps(JITCallback.of(JITCheckpointConfig()))
    monkeypatch.setitem(sys.modules, "lastcall.adapters.ray.callback", None)
    copy = cloudpickle.loads(data)
    assert type(copy) is WorkerCallback and not isinstance(copy, ControllerCallback)
    assert copy.after_init_train_context() is None
    assert "on every node of the cluster: python3 -m pip install lastcall-" in capsys.readouterr().err


def test_where_the_ranks_meet_travels_from_the_controller_to_the_workers() -> None:
    one = JITCallback.of(JITCheckpointConfig())
    one._store_address = {"host": "10.0.0.1", "port": 7, "secret": "s", "incarnation": 3}
    assert cloudpickle.loads(cloudpickle.dumps(one))._store_address == one._store_address


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("before_init_train_context", ([],)),
        ("after_worker_group_poll_status", (None,)),
        ("after_report", (None, [])),
        ("after_controller_finish", (None,)),
        ("before_worker_shutdown", ()),
    ],
)
def test_nothing_of_ours_is_raised_into_ray(
    method: str, arguments: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    one = JITCallback.of(JITCheckpointConfig())
    one._controller = one._worker = Broken()  # type: ignore[assignment]
    assert getattr(one, method)(*arguments) in (None, {})
    assert "lastcall failed in" in caplog.text and "; the run continues" in caplog.text


def test_a_worker_that_cannot_be_protected_trains_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    one = JITCallback({"enabled": True}, {"host": "127.0.0.1", "port": 1, "secret": "", "incarnation": 1})
    one.after_init_train_context()  # no train context in this process
    assert "after_init_train_context; the run continues" in caplog.text


def test_the_source_that_rebuilds_it_belongs_to_no_module() -> None:
    assert callback._rebuilder().__module__ == "__main__"
