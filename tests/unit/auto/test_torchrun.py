from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import types
from typing import Any

import pytest

from lastcall.auto import torchrun

MARGIN = torchrun.MARGIN_SECONDS
VARIABLES = ("LASTCALL_GRACE_SECONDS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def elastic() -> types.ModuleType:
    """A copy of torch's own module, so that the one of this process stays as it is."""
    spec = importlib.util.find_spec("torch.distributed.elastic.multiprocessing.api")
    assert spec is not None and spec.origin is not None
    copied = importlib.util.spec_from_file_location("elastic_copy", spec.origin)
    assert copied is not None and copied.loader is not None
    module = importlib.util.module_from_spec(copied)
    sys.modules["elastic_copy"] = module  # its dataclasses look there
    try:
        copied.loader.exec_module(module)
    finally:
        del sys.modules["elastic_copy"]
    return module


def closing(module: types.ModuleType) -> Any:
    """A context of a class that torch's own launcher could have made: what reaches _close is kept."""

    class Context(module.PContext):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self._tail_logs: list[object] = []
            self.filtered_stdout = self.filtered_stderr = None
            self.closed: list[tuple[Any, float]] = []

        def _close(self, death_sig: Any, timeout: float = 30) -> None:
            self.closed.append((death_sig, timeout))

        def _start(self) -> None: ...
        def _poll(self) -> None: ...
        def pids(self) -> dict[int, int]:
            return {}

    return Context()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 30 + MARGIN),
        ({"LASTCALL_GRACE_SECONDS": "60"}, 60 + MARGIN),
        ({"LASTCALL_GRACE_SECONDS": "60", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"}, 60 + MARGIN),
        ({"LASTCALL_GRACE_SECONDS": "60", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 120),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 120),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"}, 10),
        ({"LASTCALL_GRACE_SECONDS": "soon", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 120),
        ({"LASTCALL_GRACE_SECONDS": "inf"}, 30 + MARGIN),
        ({"LASTCALL_GRACE_SECONDS": "-1"}, 30 + MARGIN),
        ({"LASTCALL_GRACE_SECONDS": ""}, 30 + MARGIN),
    ],
)
def test_workers_are_waited_for_as_long_as_the_grace_and_a_margin(
    environ: dict[str, str], seconds: float
) -> None:
    assert torchrun.least_seconds(environ) == seconds


def test_a_close_without_a_timeout_waits_for_the_whole_grace(
    elastic: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun.apply(elastic)
    monkeypatch.setenv("LASTCALL_GRACE_SECONDS", "60")
    context = closing(elastic)
    context.close()
    context.close(signal.SIGINT)
    context.close(signal.SIGTERM, 5)
    context.close(death_sig=signal.SIGTERM, timeout=5)
    assert context.closed == [
        (signal.SIGTERM, 65),
        (signal.SIGINT, 65),
        (signal.SIGTERM, 65),
        (signal.SIGTERM, 65),
    ]


def test_a_longer_timeout_stays_and_a_kill_is_not_waited_for(elastic: types.ModuleType) -> None:
    torchrun.apply(elastic)
    context = closing(elastic)
    context.close(signal.SIGTERM, 600)
    context.close(signal.SIGKILL, 1)
    context.close(signal.SIGTERM, None)
    assert context.closed == [(signal.SIGTERM, 600), (signal.SIGKILL, 1), (signal.SIGTERM, None)]


def test_both_classes_of_torch_are_covered_and_it_is_done_once(elastic: types.ModuleType) -> None:
    original = elastic.PContext.close
    torchrun.apply(elastic)
    once = elastic.PContext.close
    torchrun.apply(elastic)
    assert elastic.PContext.close is once is not original
    assert elastic.SubprocessContext.close is once is elastic.MultiprocessContext.close
    assert (once.__name__, once.__doc__, once.__module__) == (
        original.__name__,
        original.__doc__,
        original.__module__,
    )


def _gone(context: Any) -> None:
    del context.close


def _renamed(context: Any) -> None:
    context.close = lambda self, sig=None, patience=30: None


def _in_milliseconds_of_text(context: Any) -> None:
    context.close = lambda self, death_sig=None, timeout="30s": None


def _native(context: Any) -> None:
    context.close = 7


@pytest.mark.parametrize("change", [_gone, _renamed, _in_milliseconds_of_text, _native])
def test_a_torch_that_looks_different_is_left_alone_with_a_warning(
    elastic: types.ModuleType, change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    change(elastic.PContext)
    before = elastic.PContext.__dict__.get("close")
    torchrun.apply(elastic)
    assert elastic.PContext.__dict__.get("close") is before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lastcall: elastic_copy.PContext.close of this torch version has no timeout")


def test_a_module_without_the_class_is_left_alone_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    torchrun.apply(types.ModuleType("empty"))
    assert capsys.readouterr().err.startswith("lastcall: empty.PContext.close of this torch")


def test_a_real_worker_that_needs_longer_than_it_was_given_is_not_killed(
    elastic: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given no time at all; with the grace it ends by itself, with the code of its choice."""
    monkeypatch.setenv("LASTCALL_GRACE_SECONDS", "60")
    torchrun.apply(elastic)
    source = (
        "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(75))\nprint('up', flush=True)\nwhile "
        "True: signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"

    class Handler:
        proc = process

        def close(self, death_sig: int) -> None:
            process.send_signal(death_sig)

    context = elastic.SubprocessContext.__new__(elastic.SubprocessContext)
    context.subprocess_handlers, context._tail_logs = {0: Handler()}, []
    context.filtered_stdout = context.filtered_stderr = None
    context.close(timeout=0)
    assert process.wait() == 75
    process.stdout.close()
