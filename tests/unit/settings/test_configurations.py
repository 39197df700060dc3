from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

from lastcall import errors, settings
from lastcall.settings import JITCheckpointConfig, PeriodicCheckpointConfig

RAY_ENABLED = "RAY_TRAIN_JIT_CHECKPOINT_ENABLED"
RAY_WAIT = "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT"


def jit(environ: dict[str, str] | None = None, **given: object) -> JITCheckpointConfig:
    return JITCheckpointConfig(**given, environ=environ or {})  # type: ignore[arg-type]


def periodic(environ: dict[str, str] | None = None, **given: object) -> PeriodicCheckpointConfig:
    return PeriodicCheckpointConfig(**given, environ=environ or {})  # type: ignore[arg-type]


def test_without_arguments_and_environment_all_values_are_the_documented_defaults() -> None:
    config = jit()
    assert (config.enabled, config.kill_wait, config.grace, config.signals) == (True, 3.0, 30.0, ("SIGTERM",))
    assert (
        config.rescue,
        config.spare,
        config.huge_pages,
        config.threads,
        config.exit_code,
        config.log_level,
    ) == (
        True,
        True,
        True,
        16,
        75,
        "INFO",
    )
    assert (config.guard, config.guard_steps, config.guard_seconds, config.guard_folder) == (
        False,
        None,
        None,
        "/dev/shm",
    )
    assert (config.ranks, config.on_hang, config.hang_seconds) == ("together", "save", 30.0)
    assert (config.progress_port, config.run_id, config.stop_file) == (None, None, None)
    assert (config.directory, config.progress_push) == (None, True)
    assert set(config.origins().values()) == {"default"}
    other = periodic()
    assert (other.save_strategy, other.save_steps, other.save_total_limit) == ("no", None, None)
    assert (other.monitor, other.mode, other.save_best_only) == (None, "min", False)


def test_every_field_can_be_set_from_its_variable() -> None:
    config = jit(
        {
            "LASTCALL_ENABLED": "off",
            "LASTCALL_KILL_WAIT_SECONDS": "1.5",
            "LASTCALL_GRACE_SECONDS": "120",
            "LASTCALL_SIGNALS": "sigusr1, SIGTERM,,SIGUSR1",
            "LASTCALL_RESCUE": "NO",
            "LASTCALL_SPARE": "False",
            "LASTCALL_HUGE_PAGES": "0",
            "LASTCALL_GUARD": "yes",
            "LASTCALL_GUARD_STEPS": "10",
            "LASTCALL_GUARD_SECONDS": "2.5",
            "LASTCALL_GUARD_FOLDER": "/mnt/memory",
            "LASTCALL_WRITER_THREADS": "8",
            "LASTCALL_RANKS": "SEPARATE",
            "LASTCALL_ON_HANG": "exit",
            "LASTCALL_ON_ERROR": "leave",
            "LASTCALL_HANG_SECONDS": "90",
            "LASTCALL_EXIT_CODE": "85",
            "LASTCALL_LOG_LEVEL": "debug",
            "LASTCALL_PROGRESS_PORT": "28080",
            "LASTCALL_RUN_ID": " exp 1 ",
            "LASTCALL_DIRECTORY": "/mnt/checkpoints",
            "LASTCALL_PROGRESS_PUSH": "off",
            "LASTCALL_STOP_FILE": "/tmp/a stop ",
            "LASTCALL_MIRROR": " s3://runs/exp1/ ",
            "LASTCALL_MIRROR_KEYS": "/mnt/connection",
            "LASTCALL_UNMATCHED": "allow",
        }
    )
    assert (config.enabled, config.kill_wait, config.grace) == (False, 1.5, 120.0)
    assert config.signals == ("SIGUSR1", "SIGTERM")
    assert (config.rescue, config.spare, config.huge_pages, config.threads, config.exit_code) == (
        False,
        False,
        False,
        8,
        85,
    )
    assert (config.guard, config.guard_steps, config.guard_seconds, config.guard_folder) == (
        True,
        10,
        2.5,
        "/mnt/memory",
    )
    assert (config.ranks, config.on_hang, config.hang_seconds) == ("separate", "exit", 90.0)
    assert config.on_error == "leave"
    assert (config.log_level, config.progress_port, config.run_id) == ("DEBUG", 28080, "exp 1")
    assert (config.stop_file, config.directory, config.progress_push) == (
        "/tmp/a stop",
        "/mnt/checkpoints",
        False,
    )
    assert config.unmatched == "allow"
    assert (config.mirror, config.mirror_keys) == ("s3://runs/exp1", "/mnt/connection")
    assert config.origins() == {setting.field: setting.variable for setting in settings.JIT}

    other = periodic(
        {
            "LASTCALL_SAVE_STRATEGY": "epoch",
            "LASTCALL_SAVE_STEPS": "7",
            "LASTCALL_SAVE_TOTAL_LIMIT": "3",
            "LASTCALL_MONITOR": "eval_loss",
            "LASTCALL_MODE": "max",
            "LASTCALL_SAVE_BEST_ONLY": "yes",
        }
    )
    assert (other.save_strategy, other.save_steps, other.save_total_limit) == ("epoch", 7, 3)
    assert (other.monitor, other.mode, other.save_best_only) == ("eval_loss", "max", True)
    assert other.origins() == {setting.field: setting.variable for setting in settings.PERIODIC}


def test_an_argument_wins_over_the_environment() -> None:
    config = jit({"LASTCALL_KILL_WAIT_SECONDS": "9"}, kill_wait=1)
    assert config.kill_wait == 1.0 and type(config.kill_wait) is float
    assert config.origins()["kill_wait"] == "argument"


def test_a_variable_that_an_argument_overrides_is_not_even_looked_at() -> None:
    assert jit({"LASTCALL_KILL_WAIT_SECONDS": "abc"}, kill_wait=1).kill_wait == 1.0


def test_the_names_of_ray_train_work_and_ours_win_over_them() -> None:
    config = jit({RAY_ENABLED: "0", RAY_WAIT: "5.0"})
    assert (config.enabled, config.kill_wait) == (False, 5.0)
    assert config.origins()["kill_wait"] == RAY_WAIT
    config = jit(
        {RAY_ENABLED: "0", RAY_WAIT: "5.0", "LASTCALL_ENABLED": "1", "LASTCALL_KILL_WAIT_SECONDS": "2"}
    )
    assert (config.enabled, config.kill_wait) == (True, 2.0)
    assert config.origins()["enabled"] == "LASTCALL_ENABLED"


def test_an_empty_variable_counts_as_unset() -> None:
    config = jit({"LASTCALL_ENABLED": "", RAY_ENABLED: "false", "LASTCALL_SIGNALS": "  "})
    assert config.enabled is False
    assert config.origins()["enabled"] == RAY_ENABLED
    assert config.origins()["signals"] == "default"


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", " true "])
def test_words_for_yes(text: str) -> None:
    assert jit({"LASTCALL_ENABLED": text}, enabled=None).enabled is True


@pytest.mark.parametrize("text", ["0", "FALSE", "no", "oFF"])
def test_words_for_no(text: str) -> None:
    assert jit({"LASTCALL_ENABLED": text}).enabled is False
    assert jit(enabled=text).enabled is False  # not bool("off"), which is True


def test_the_message_names_the_variable_the_value_and_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        jit({"LASTCALL_KILL_WAIT_SECONDS": "abc"})
    message = (
        "LASTCALL_KILL_WAIT_SECONDS='abc' is not a number of seconds. Set it to a number of at least 0, "
        "for example: export LASTCALL_KILL_WAIT_SECONDS=3.0"
    )
    assert str(caught.value) == message
    assert capsys.readouterr().err == f"lastcall: {message}\n"


def test_the_message_names_the_alias_where_the_alias_was_set() -> None:
    with pytest.raises(errors.ConfigError, match=f"export {RAY_WAIT}=3.0"):
        jit({RAY_WAIT: "soon"})


def test_the_message_names_the_argument_and_shows_python() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        jit(signals=("SIGKILL",))
    assert str(caught.value) == (
        "signals=('SIGKILL',) names a signal that lastcall does not listen to. Set it to one or more of "
        "SIGTERM, "
        "SIGUSR1, SIGUSR2, SIGINT, SIGHUP, or none, for example: signals=('SIGTERM', 'SIGUSR1')"
    )


@pytest.mark.parametrize(
    ("field", "value", "because"),
    [
        ("enabled", "maybe", "neither yes nor no"),
        ("enabled", 2, "neither yes nor no"),
        ("kill_wait", "", "not a number"),
        ("kill_wait", True, "not a number"),
        ("kill_wait", [1], "not a number"),
        ("kill_wait", 10**400, "not a number"),
        ("kill_wait", -0.5, "negative"),
        ("kill_wait", float("nan"), "finite"),
        ("kill_wait", "inf", "finite"),
        ("grace", 0, "no time"),
        ("grace", "-1", "negative"),
        ("signals", 15, "not a list"),
        ("signals", ",", "names no signal"),
        ("signals", (15,), "does not listen"),
        ("threads", 0, "less than 1"),
        ("threads", 65, "more than 64"),
        ("threads", 2.0, "whole number"),
        ("threads", True, "whole number"),
        ("exit_code", 0, "training finished"),
        ("exit_code", 256, "not an exit code"),
        ("exit_code", -1, "not an exit code"),
        ("exit_code", "x", "whole number"),
        ("ranks", "apart", "not one of"),
        ("on_hang", "wait", "not one of"),
        ("on_hang", True, "not one of"),
        ("hang_seconds", "never", "not a number"),
        ("hang_seconds", -1, "negative"),
        ("hang_seconds", 0, "no time"),
        ("progress_port", "http", "whole number"),
        ("progress_port", "65536", "not a port"),
        ("progress_port", -1, "not a port"),
        ("log_level", "LOUD", "not one of"),
        ("log_level", 20, "not one of"),
        ("mirror", "runs/exp1", "neither a bucket nor a folder"),
        ("mirror", "gs://runs/exp1", "neither a bucket nor a folder"),
        ("mirror", "s3://", "neither a bucket nor a folder"),
        ("mirror", "s3:///exp1", "neither a bucket nor a folder"),
        ("mirror", "file://exp1", "neither a bucket nor a folder"),
        ("mirror", "file:///", "neither a bucket nor a folder"),
        ("mirror", 3, "neither a bucket nor a folder"),
        ("mirror", "s3://runs/../other", "points outside"),
    ],
)
def test_a_wrong_value_is_refused(field: str, value: Any, because: str) -> None:
    with pytest.raises(errors.ConfigError, match=because) as caught:
        jit(**{field: value})
    assert str(caught.value).startswith(f"{field}={value!r} ")
    if isinstance(value, str) and value:
        variable = next(setting.variable for setting in settings.JIT if setting.field == field)
        with pytest.raises(errors.ConfigError, match=because) as caught:
            jit({variable: value})
        assert str(caught.value).startswith(f"{variable}={value!r} ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("save_strategy", "sometimes"),
        ("save_steps", 0),
        ("save_steps", 0.1),
        ("save_total_limit", 0),
        ("monitor", ""),
        ("monitor", 3),
        ("mode", "best"),
        ("save_best_only", "perhaps"),
    ],
)
def test_a_wrong_periodic_value_is_refused(field: str, value: Any) -> None:
    with pytest.raises(errors.ConfigError, match=f"^{field}="):
        periodic(**{field: value})


def test_a_kill_wait_beyond_the_grace_is_refused_where_both_were_given() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        jit({"LASTCALL_GRACE_SECONDS": "10"}, kill_wait=11)
    assert str(caught.value) == (
        "kill_wait=11.0 is longer than LASTCALL_GRACE_SECONDS=10.0: the kill would come before the save "
        "starts. "
        "Lower kill_wait or raise LASTCALL_GRACE_SECONDS."
    )
    assert jit(kill_wait=10, grace=10).kill_wait == 10


def test_a_kill_wait_beyond_a_default_grace_is_kept_for_the_budget_to_cut_short() -> None:
    config = jit(kill_wait=60)
    assert (config.kill_wait, config.grace) == (60.0, 30.0)
    config = jit(grace=2)
    assert (config.kill_wait, config.grace) == (3.0, 2.0)


def test_no_signals_at_all_may_be_asked_for() -> None:
    assert jit(signals=()).signals == jit({"LASTCALL_SIGNALS": " None "}).signals == ()
    assert jit(signals=["SIGINT"]).signals == ("SIGINT",)
    assert jit(signals="SIGINT").signals == ("SIGINT",)  # the forgotten comma of ("SIGINT")


def test_save_steps_alone_means_save_by_steps() -> None:
    config = periodic(save_steps=100)
    assert (config.save_strategy, config.save_steps) == ("steps", 100)
    config = periodic({"LASTCALL_SAVE_STEPS": "50"})
    assert (config.save_strategy, config.save_steps) == ("steps", 50)
    assert config.origins()["save_strategy"] == "LASTCALL_SAVE_STEPS"


def test_save_steps_does_not_overrule_a_strategy_that_was_given() -> None:
    assert periodic(save_strategy="epoch", save_steps=100).save_strategy == "epoch"
    assert periodic({"LASTCALL_SAVE_STRATEGY": "no"}, save_steps=100).save_strategy == "no"


def test_saving_by_steps_without_a_number_takes_that_of_transformers() -> None:
    config = periodic(save_strategy="steps")
    assert config.save_steps == 500
    assert config.origins()["save_steps"] == "default"
    assert periodic(save_strategy="epoch").save_steps is None


def test_saving_the_best_only_needs_a_metric() -> None:
    with pytest.raises(
        errors.ConfigError,
        match=r"LASTCALL_SAVE_BEST_ONLY=True needs .* export "
        r"LASTCALL_MONITOR=",
    ):
        periodic({"LASTCALL_SAVE_BEST_ONLY": "1"})
    assert periodic(save_best_only=True, monitor="loss").save_best_only is True


def test_a_text_enum_of_a_framework_is_a_strategy() -> None:
    class IntervalStrategy(str, enum.Enum):  # noqa: UP042 - as Transformers has it
        STEPS = "steps"

    strategy = periodic(save_strategy=IntervalStrategy.STEPS).save_strategy
    assert strategy == "steps" and type(strategy) is str


def test_the_process_environment_is_read_where_no_other_is_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTCALL_GRACE_SECONDS", "77")
    monkeypatch.setenv("LASTCALL_SAVE_TOTAL_LIMIT", "4")
    assert JITCheckpointConfig().grace == 77.0
    assert PeriodicCheckpointConfig().save_total_limit == 4


def test_a_configuration_is_a_value() -> None:
    config = jit(kill_wait=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kill_wait = 2.0  # type: ignore[misc]
    assert config == jit({"LASTCALL_KILL_WAIT_SECONDS": "1"})
    assert hash(config) == hash(jit(kill_wait=1))
    assert config != jit()
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.origins() == config.origins()
    assert dataclasses.replace(config, threads=2).threads == 2
    assert "kill_wait=1.0" in repr(config) and "origins" not in repr(config)
    config.origins()["kill_wait"] = "changed"
    assert config.origins()["kill_wait"] == "argument"


def test_an_uncaught_wrong_value_leaves_with_78_and_says_why_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import lastcall.settings as s; s.JITCheckpointConfig()"],
        env={**os.environ, "LASTCALL_EXIT_CODE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78
    assert done.stderr == (
        "lastcall: LASTCALL_EXIT_CODE='0' would mean that training finished, and the run would not be "
        "restarted. "
        "Set it to a whole number from 1 to 255, for example: export LASTCALL_EXIT_CODE=75\n"
    )


def test_a_changed_configuration_keeps_the_rest_and_names_the_argument() -> None:
    config = jit({"LASTCALL_GRACE_SECONDS": "120"}, kill_wait=1.0)
    other = settings.changed(config, guard=True)
    assert (other.guard, other.grace, other.kill_wait, config.guard) == (True, 120.0, 1.0, False)
    assert (other.origins()["guard"], other.origins()["grace"]) == ("argument", "LASTCALL_GRACE_SECONDS")
    assert config.origins()["guard"] == "default"
    with pytest.raises(errors.ConfigError):
        settings.changed(config, guard="perhaps")
