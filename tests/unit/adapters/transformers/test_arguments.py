from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.trainer_utils import SaveStrategy

from lastcall.adapters.transformers import arguments
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig


def script(**said: Any) -> Any:
    return SimpleNamespace(
        **{"save_strategy": SaveStrategy.EPOCH, "save_steps": 20, "save_total_limit": None, **said}
    )


def saves(args: Any) -> tuple[Any, ...]:
    return args.save_strategy, args.save_steps, args.save_total_limit


def test_what_nobody_says_from_outside_stays_the_scripts(caplog: pytest.LogCaptureFixture) -> None:
    args = script(save_strategy=SaveStrategy.BEST, save_total_limit=5)
    with caplog.at_level(logging.INFO, "lastcall"):
        arguments.override(args, None)
        arguments.override(args, PeriodicCheckpointConfig(environ={}))
    assert saves(args) == (SaveStrategy.BEST, 20, 5)
    assert caplog.text == ""


def test_a_configuration_goes_before_the_script(caplog: pytest.LogCaptureFixture) -> None:
    args = script()
    with caplog.at_level(logging.INFO, "lastcall"):
        arguments.override(args, PeriodicCheckpointConfig("steps", 7, 3, environ={}))
    assert saves(args) == (SaveStrategy.STEPS, 7, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "save_strategy=steps instead of the script's epoch",
        "save_steps=7 instead of the script's 20",
        "save_total_limit=3 instead of the script's None",
    ]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LASTCALL_SAVE_STRATEGY": "no"}, (SaveStrategy.NO, 20, None)),
        # how often is still the script's to say
        ({"LASTCALL_SAVE_STRATEGY": "steps"}, (SaveStrategy.STEPS, 20, None)),
        ({"LASTCALL_SAVE_STEPS": "3"}, (SaveStrategy.STEPS, 3, None)),
        ({"LASTCALL_SAVE_TOTAL_LIMIT": "2"}, (SaveStrategy.EPOCH, 20, 2)),
        ({"LASTCALL_SAVE_STRATEGY": "epoch", "LASTCALL_SAVE_STEPS": "3"}, (SaveStrategy.EPOCH, 3, None)),
    ],
)
def test_so_does_the_environment(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: tuple[Any, ...]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    args = script()
    arguments.override(args, None)
    assert saves(args) == expected


def test_a_configuration_that_was_passed_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTCALL_SAVE_STEPS", "3")
    args = script()
    arguments.override(args, PeriodicCheckpointConfig(save_steps=9))
    assert saves(args) == (SaveStrategy.STEPS, 9, None)


def test_what_is_the_same_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lastcall"):
        arguments.override(script(), PeriodicCheckpointConfig("epoch", environ={}))
    assert caplog.text == ""


def test_the_guard_is_not_for_trainers(caplog: pytest.LogCaptureFixture) -> None:
    plain = JITCheckpointConfig(environ={})
    assert arguments.suited(plain) is plain and caplog.text == ""
    without = arguments.suited(JITCheckpointConfig(guard=True, grace=9.0, run_id="x", environ={}))
    assert (without.guard, without.grace, without.run_id) == (False, 9.0, "x")
    assert "LASTCALL_GUARD is not used with a Trainer" in caplog.text


def test_a_directory_that_was_named_outside_goes_before_the_scripts(caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(output_dir="out")
    with caplog.at_level(logging.INFO, "lastcall"):
        arguments.redirect(args, JITCheckpointConfig(environ={}))
        assert args.output_dir == "out" and caplog.text == ""
        for _ in range(2):
            arguments.redirect(args, JITCheckpointConfig(environ={"LASTCALL_DIRECTORY": "/mnt/x"}))
    assert args.output_dir == "/mnt/x"
    assert [record.getMessage() for record in caplog.records] == [
        "output_dir=/mnt/x instead of the script's out"
    ]
