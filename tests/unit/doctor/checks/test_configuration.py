from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes.forkserver import environment
from lastcall.doctor.checks import configuration
from lastcall.launch.shell import commandline

NOTHING = commandline.Launch()


def levels(environ: dict[str, str], command: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    launch = commandline.understand(command, environ)
    return [(item.name, item.level) for item in configuration.check(environ, launch)[1]]


def test_defaults_are_fine() -> None:
    config, findings = configuration.check({}, NOTHING)
    assert [(item.name, item.level) for item in findings] == [("settings", "ok")]
    assert config.shown()["grace"] == {
        "value": 30.0,
        "origin": "default",
        "variable": "LASTCALL_GRACE_SECONDS",
    }
    assert config.shown()["signals"]["value"] == ["SIGTERM"]


def test_every_wrong_value_is_found_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {
        "LASTCALL_KILL_WAIT_SECONDS": "soon",
        "LASTCALL_SAVE_STEPS": "0",
        "RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "perhaps",
        "LASTCALL_GRACE_SECONDS": "60",
    }
    config, findings = configuration.check(environ, NOTHING)
    assert {item.facts["variable"] for item in findings} == set(environ) - {"LASTCALL_GRACE_SECONDS"}
    assert {item.level for item in findings} == {"risk"}
    assert config.jit.grace == 60.0  # what is right is used
    wrong = next(item for item in findings if item.facts["variable"] == "LASTCALL_KILL_WAIT_SECONDS")
    assert (
        "'soon' is not a number of seconds" in wrong.says
        and "export LASTCALL_KILL_WAIT_SECONDS=3.0" in wrong.remedy
    )
    assert capsys.readouterr() == ("", "")


def test_values_that_contradict_each_other_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {
        "LASTCALL_KILL_WAIT_SECONDS": "50",
        "LASTCALL_GRACE_SECONDS": "40",
        "LASTCALL_SAVE_BEST_ONLY": "1",
    }
    _, findings = configuration.check(environ, NOTHING)
    assert [item.level for item in findings] == ["risk", "risk"]
    assert "longer than" in findings[0].says and "LASTCALL_MONITOR" in findings[1].remedy
    assert capsys.readouterr().err == ""


def test_a_misspelt_variable_is_a_risk_and_a_strange_one_a_warning() -> None:
    assert levels({"LASTCALL_GRACE_SECOND": "60"}) == [("variables", "risk")]
    assert levels({"LASTCALL_FAVOURITE_COLOUR": "blue"}) == [("variables", "warning")]
    _, (found,) = configuration.check({"LASTCALL_GRACE_SECOND": "top secret"}, NOTHING)
    assert (
        found.remedy == 'export LASTCALL_GRACE_SECONDS="$LASTCALL_GRACE_SECOND"; unset LASTCALL_GRACE_SECOND'
    )
    assert "top secret" not in str(found)  # values of unknown variables may be secrets


def test_variables_of_lastcall_run_are_known(tmp_path: Path) -> None:
    environ = {
        "LASTCALL_SLURM_LEAD_SECONDS": "60",
        "LASTCALL_REQUEUE_FILE": "x",
        "LASTCALL_REGISTRY": str(tmp_path),
    }
    assert levels(environ) == [("settings", "ok")]


def test_switched_off_is_a_risk() -> None:
    assert levels({"LASTCALL_ENABLED": "off"}) == [("enabled", "risk")]
    assert levels({"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "0"}) == [("enabled", "risk")]


def test_a_program_that_nothing_switches_on_is_a_warning(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    command = ("python", str(script))
    assert levels({}, command) == [("enabled", "warning")]
    assert levels({"LASTCALL_ENABLED": "1"}, command) == [("settings", "ok")]
    assert levels({}, ("lastcall", "run", "--", *command)) == [("settings", "ok")]
    assert levels({}, ("python", "-m", "package")) == [("settings", "ok")]  # cannot be seen
    assert levels({}, ("python", str(tmp_path / "missing.py"))) == [("settings", "ok")]
    script.write_text("import lastcall\n")
    assert levels({}, command) == [("settings", "ok")]


def test_what_lastcall_run_is_told_counts() -> None:
    launch = commandline.understand(
        ("lastcall", "run", "--grace", "90", "--guard-steps", "5", "--", "python", "-m", "x"), {}
    )
    config, _ = configuration.check({"LASTCALL_GRACE_SECONDS": "60"}, launch)
    assert (config.jit.grace, config.jit.guard, config.jit.guard_steps) == (90.0, True, 5)


def test_versions_are_told_without_importing_anything() -> None:
    source = (
        "import sys; from lastcall.doctor.checks import configuration as c; "
        "print(c.versions()['python']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == ".".join(map(str, sys.version_info[:3])), done.stderr


def test_a_missing_xxhash_and_an_old_torch_are_warnings() -> None:
    there: dict[str, str | None] = {"python": "3.11.0", "xxhash": "3.5.0", "torch": "2.4.0+cu121"}
    assert [item.level for item in configuration.check_versions(there)] == ["ok"]
    assert [item.level for item in configuration.check_versions({**there, "torch": None})] == ["ok"]
    assert [
        item.level for item in configuration.check_versions({**there, "torch": "2.0.1", "xxhash": None})
    ] == ["warning", "warning"]
