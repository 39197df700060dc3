from __future__ import annotations

import inspect
import logging
import random
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.kubeflow import functions as kubeflow_functions
from lastcall.adapters.kubeflow import function_text, pod
from lastcall.adapters.transformers import listeners


def alone(path: str, answer: int = 42) -> None:
    with open(path, "a") as file:
        file.write(f"{answer}\n")


@pytest.fixture(autouse=True)
def _listeners_as_before() -> Any:
    before = list(listeners.begun)
    yield
    listeners.begun[:] = before


def script_of(func: Any, args: dict[str, Any] | None) -> str:
    """As both backends of the SDK write it."""
    stub = function_text.stub(func, args)
    return f"{inspect.getsource(stub)}\n{stub.__name__}()\n"


def test_there_and_back() -> None:
    args = {"a": [1, 2.5, None, True], "b": {"ü": ("x", b"y", {1})}, "c": "${x} `y` '\"\n"}
    name, source, found = pod.unpacked(function_text.packed(kubeflow_functions.peculiar, args))
    assert (name, source, found) == ("peculiar", inspect.getsource(kubeflow_functions.peculiar), args)
    assert pod.unpacked(function_text.packed(kubeflow_functions.peculiar, None))[2] == {}


def test_nothing_in_what_is_shipped_means_anything_to_a_shell() -> None:
    text = script_of(kubeflow_functions.peculiar, {"path": "$HOME"})
    assert not set(text) & set("$`\\") and "EOM" not in text.splitlines()


def test_a_function_within_a_function_keeps_the_text_of_its_lines(tmp_path: Path) -> None:
    def inner(path: str) -> None:
        with open(path, "w") as file:
            file.write("""
        indented
as it is""")

    script = {"__name__": "__main__", "__file__": str(tmp_path / "script.py")}
    pod.run(script, function_text.packed(inner, {"path": str(tmp_path / "said")}))
    assert (tmp_path / "said").read_text() == "\n        indented\nas it is"


def test_what_cannot_travel_is_refused_with_what_to_do() -> None:
    outer = 3

    def uses(x: int = 1) -> int:
        return outer + x

    with pytest.raises(ValueError, match=r"uses\(\) uses outer of the enclosing function.*func_args"):
        function_text.stub(uses, None)
    with pytest.raises(ValueError, match="is not a named function"):
        function_text.stub(lambda: None, None)
    with pytest.raises(ValueError, match="is not a named function"):
        function_text.stub(SimpleNamespace, None)
    with pytest.raises(ValueError, match="cannot be sent to the pod"):
        function_text.stub(alone, {"path": Path("x")})
    with pytest.raises(ValueError, match="cannot be sent to the pod"):
        function_text.stub(alone, {"path": float("inf")})
    made: dict[str, Any] = {}
    exec("def typed(): pass", made)
    with pytest.raises(ValueError, match=r"the source of typed\(\) cannot be found"):
        function_text.stub(made["typed"], None)


def test_two_functions_do_not_take_each_others_text() -> None:
    one, two = function_text.stub(alone, {"path": "1"}), function_text.stub(alone, {"path": "2"})
    assert inspect.getsource(one) != inspect.getsource(two)
    assert Path(inspect.getfile(one)).name == Path(inspect.getfile(two)).name == "lastcall_kubeflow.py"


def test_a_script_calls_its_function_once_and_a_child_that_it_spawns_does_not(tmp_path: Path) -> None:
    text = function_text.packed(alone, {"path": str(tmp_path / "said")})
    for name in ("__main__", "__mp_main__"):
        script: dict[str, Any] = {"__name__": name, "__file__": str(tmp_path / "script.py")}
        pod.run(script, text)
        assert script["alone"].__module__ == name and inspect.getsource(script["alone"]) == inspect.getsource(
            alone
        )
    assert (tmp_path / "said").read_text() == "42\n"
    assert (tmp_path / "kubeflow_alone.py").read_text() == inspect.getsource(alone)


def test_a_traceback_shows_the_functions_own_lines(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script_of(alone, {"path": str(tmp_path / "none" / "x")}))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert 'kubeflow_alone.py", line 2, in alone\n    with open(path, "a") as file:' in done.stderr


def test_a_folder_that_cannot_be_written_costs_nothing_but_those_lines(tmp_path: Path) -> None:
    script = {"__name__": "__main__", "__file__": str(tmp_path / "none" / "script.py")}
    pod.run(script, function_text.packed(alone, {"path": str(tmp_path / "said")}))
    assert (tmp_path / "said").read_text() == "42\n"


@pytest.mark.parametrize("listening", [True, False])
def test_the_lines_that_people_look_for_are_said_when_they_are_true(
    listening: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = SimpleNamespace(
        listening=listening, jit=SimpleNamespace(signals=("SIGTERM",)), root=Path("/mnt/x"), resumed=12
    )
    with caplog.at_level(logging.INFO, "lastcall"):
        pod.announce(run)
    said = [record.getMessage() for record in caplog.records]
    assert ("[Kubeflow] JIT checkpoint signal handler registered for SIGTERM" in said) is listening
    assert ("[Kubeflow] JIT checkpointing enabled" in said) is listening
    assert said[-2:] == ["[Kubeflow] output_dir: /mnt/x", "[Kubeflow] Auto-resuming from checkpoint-12"]


def test_more_than_a_command_has_room_for_is_refused_and_less_is_started() -> None:
    """Linux starts no process with a longer argument: the pod would fail, and say so to nobody."""

    def train(data: str) -> str:
        return data

    function_text.check_size(train, {"data": "x" * 1_000_000})  # it is compressed
    noise = "".join(random.Random(0).choices(string.printable, k=120_000))
    with pytest.raises(ValueError, match="room for"):
        function_text.check_size(train, {"data": noise})
    largest = noise[:80_000]
    function_text.check_size(train, {"data": largest})
    script = inspect.getsource(function_text.stub(train, {"data": largest}))
    assert subprocess.run(["true", script + " " * 8192], check=False).returncode == 0
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["true", "x" * 131_072], check=False)
