"""What Ray Train calls: one object, made in the driver, copied to the controller and from there to every
train worker.

Nothing of ours is ever raised into Ray: an exception in a callback ends the run, and a run without protection
is better than none. Where lastcall is not installed on the cluster, the copy is a callback of Ray's own that
does nothing, and logs that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    ReportCallback,
    WorkerCallback,
    WorkerGroupCallback,
)

from lastcall import __version__, installing
from lastcall import script as scripts
from lastcall.adapters.ray.controller import Controller
from lastcall.adapters.ray.never_raise import never_raises
from lastcall.settings import JIT, JITCheckpointConfig, stop_file

# Pickled as source, not by name: it must work where there is no lastcall. So it belongs to no module.
_REBUILD = """
def rebuild(home, name, values):
    try:
        import importlib
        return getattr(importlib.import_module(home), name)(**values)
    except Exception as error:
        import sys
        from ray.train.v2._internal.execution.callback import WorkerCallback
        sys.stderr.write(
            "lastcall: this run is not protected: lastcall cannot be used in this process (%s: %s). "
            "Install it on every node of the cluster: WHEEL\\n" % (type(error).__name__, error)
        )
        return WorkerCallback()
""".replace("WHEEL", installing.wheel(__version__))


def reduced(kind: type, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """For __reduce__: the object is made again from its class and its values; without lastcall, it is a
    callback that does nothing."""
    return _rebuilder(), (kind.__module__, kind.__name__, dict(values))


def _rebuilder() -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_REBUILD, names)
    rebuild: Callable[..., Any] = names["rebuild"]
    return rebuild


class JITCallback(ControllerCallback, WorkerGroupCallback, WorkerCallback, ReportCallback):  # type: ignore[misc]
    """`settings`: the fields of the driver's JITCheckpointConfig. `store_address`: where the ranks meet.
    `sources`: the text of the script by filename: the machines of the workers may not have it."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        store_address: Mapping[str, Any] | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.sources = dict(sources or {})
        self._settings = dict(settings)
        self._store_address = dict(store_address) if store_address is not None else None
        self._controller: Controller | None = None
        self._worker: Any = None

    @classmethod
    def of(cls, jit: JITCheckpointConfig, sources: Mapping[str, str] | None = None) -> JITCallback:
        return cls({setting.field: getattr(jit, setting.field) for setting in JIT}, sources=sources)

    def __reduce__(self) -> tuple[Any, ...]:
        values = {
            "settings": self._settings, "store_address": self._store_address, "sources": self.sources
        }  # fmt: skip
        return reduced(type(self), values)

    @property
    def _jit(self) -> JITCheckpointConfig:
        return JITCheckpointConfig(**{**self._settings, "stop_file": stop_file()}, environ={})

    # ---- in the controller ---------------------------------------------------------------------------------

    @never_raises
    def after_controller_start(self, *given: Any) -> None:
        controller = Controller(self._jit, given[0] if given else None)
        controller.start()
        self._controller = controller

    def before_init_train_context(self, workers: Any) -> dict[str, Any]:
        """Ray asks for more arguments of the train context; ours travel in this object."""
        self._next_incarnation()
        return {}

    @never_raises
    def _next_incarnation(self) -> None:
        if self._controller is not None:
            self._store_address = self._controller.next_incarnation()

    @never_raises
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        if self._controller is not None:
            self._controller.polled(worker_group_status)

    @never_raises
    def after_report(self, training_report: Any, *_: Any, **__: Any) -> None:
        if self._controller is not None:
            self._controller.reported(training_report.checkpoint)

    @never_raises
    def after_controller_finish(self, *given: Any) -> None:
        if self._controller is not None:
            self._controller.stop()
            self._controller.finished(given[0] if given else None)

    # ---- in a train worker ---------------------------------------------------------------------------------

    @never_raises
    def after_init_train_context(self) -> None:
        """In the main thread, after Ray has installed its own SIGTERM handler and before training starts: a
        handler that is installed earlier is replaced by Ray's."""
        from lastcall.adapters.ray.worker.worker import TrainWorker

        if self._store_address is not None:
            scripts.provide(self.sources)
            worker = TrainWorker(self._jit, self._store_address)
            worker.begin()
            self._worker = worker

    @never_raises
    def before_worker_shutdown(self) -> None:
        """The SIGTERM that Ray sends from now on is no notice."""
        if self._worker is not None:
            self._worker.end()
