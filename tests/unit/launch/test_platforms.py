"""Which platform this is, and what the command finds in its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastcall.launch import command, environment, platforms
from lastcall.launch.options import LaunchOptions


@pytest.mark.parametrize(
    ("name", "environ", "found", "code"),
    [
        ("auto", {}, "plain", 75),
        ("auto", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes", 75),
        ("auto", {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RUNAI_PROJECT": "vision"}, "runai", 1),
        ("auto", {"SLURM_JOB_ID": "7"}, "slurm", 75),
        ("auto", {"_CONDOR_JOB_AD": "/x"}, "htcondor", 85),
        ("auto", {"SLURM_JOB_ID": ""}, "plain", 75),
        ("plain", {"SLURM_JOB_ID": "7"}, "plain", 75),
        ("runai", {}, "runai", 1),
    ],
)
def test_the_platform_is_told_by_its_variables_or_by_hand(
    name: str, environ: dict[str, str], found: str, code: int
) -> None:
    platform, because = platforms.choose(name, environ)
    assert (platform.name, platform.exit_code) == (found, code)
    assert because


def test_outside_a_slurm_job_there_is_nothing_to_requeue(caplog: pytest.LogCaptureFixture) -> None:
    assert not platforms.requeue({})
    assert "SLURM_JOB_ID is not set" in caplog.text


def test_only_the_first_task_of_a_step_requeues(tmp_path: Path) -> None:
    assert not platforms.requeue(
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_SUBMIT_DIR": str(tmp_path)}
    )
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    environ = {"SLURM_JOB_ID": "7", "PATH": "", platforms.REQUEUE_FILE: str(tmp_path / "file" / "request")}
    assert not platforms.requeue(environ)
    assert "could not be written" in caplog.text and "Run: scontrol requeue 7" in caplog.text


def build(environ: dict[str, str], **more: object) -> dict[str, str]:
    options = LaunchOptions(("true",), auto=False, **more)  # type: ignore[arg-type]
    return environment.build(options, 85, Path("/registry"), environ)


def test_the_command_finds_the_launcher_and_the_platforms_code() -> None:
    built = build({"HOME": "/me"})
    assert built == {
        "HOME": "/me",
        "LASTCALL_REGISTRY": "/registry",
        "LASTCALL_ENABLED": "1",
        "LASTCALL_EXIT_CODE": "85",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90",
    }


def test_what_the_user_has_set_stays() -> None:
    built = build({"LASTCALL_ENABLED": "0", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"})
    assert (built["LASTCALL_ENABLED"], built["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == ("0", "7")
    assert build({"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "0"})["LASTCALL_ENABLED"] == "0"
    assert build({"LASTCALL_ENABLED": " "})["LASTCALL_ENABLED"] == "1"


def test_options_become_variables() -> None:
    built = build(
        {},
        grace=12.5,
        grace_given=True,
        guard=True,
        guard_steps=3,
        guard_seconds=0.5,
        log_level="DEBUG",
        log_level_given=True,
    )
    assert built["LASTCALL_GRACE_SECONDS"] == "12.5"
    assert (built["LASTCALL_GUARD"], built["LASTCALL_GUARD_STEPS"], built["LASTCALL_GUARD_SECONDS"]) == (
        "1",
        "3",
        "0.5",
    )
    assert built["LASTCALL_LOG_LEVEL"] == "DEBUG"
    assert built["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "73"


def test_the_bootstrap_goes_before_what_is_there() -> None:
    options = LaunchOptions(("true",))
    path = environment.build(options, 75, Path("/registry"), {"PYTHONPATH": "/mine"})["PYTHONPATH"].split(":")
    assert path[-1] == "/mine" and len(path) == 2


def test_a_command_is_found_as_a_shell_finds_it(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool").touch()
    environ = {"PATH": f"{tmp_path / 'none'}:{tmp_path / 'one'}:{tmp_path / 'two'}"}
    with pytest.raises(command.CannotStart, match="chmod") as found:
        command.locate("tool", environ)
    assert found.value.code == 126
    (tmp_path / "two" / "tool").chmod(0o755)
    assert command.locate("tool", environ) == str(tmp_path / "two" / "tool")
    with pytest.raises(command.CannotStart, match="not found") as missing:
        command.locate("other", environ)
    assert missing.value.code == 127


@pytest.mark.parametrize(
    ("said", "standing"),
    [  # as Slurm 22.05 says it
        ("JobState=RUNNING Reason=None Restarts=0 PreemptTime=None", platforms.Standing.RUNNING),
        (
            "JobState=RUNNING Reason=None Restarts=0 PreemptTime=2026-11-15T11:50:13",
            platforms.Standing.RUNNING,
        ),
        ("JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None", platforms.Standing.CANCELLED),
        ("JobState=CANCELLED Reason=None Restarts=0", platforms.Standing.CANCELLED),
        ("JobState=COMPLETING Reason=TimeLimit Restarts=0 PreemptTime=None", platforms.Standing.ENDING),
        (
            "JobState=COMPLETING Reason=None Restarts=0 PreemptTime=2026-11-15T11:46:11",
            platforms.Standing.ENDING,
        ),
        ("JobState=COMPLETING Reason=None Restarts=1", platforms.Standing.REQUEUED),
        ("JobState=PENDING Reason=BeginTime Restarts=1", platforms.Standing.REQUEUED),
        ("", platforms.Standing.RUNNING),
        ("slurm_load_jobs error: Invalid job id specified", platforms.Standing.RUNNING),
    ],
)
def test_whether_to_requeue_is_told_by_what_slurm_is_doing_with_the_job(
    said: str, standing: platforms.Standing
) -> None:
    assert platforms.standing(said, 0) is standing


def test_the_restarts_of_earlier_lives_do_not_count() -> None:
    assert platforms.standing("JobState=RUNNING Restarts=3", 3) is platforms.Standing.RUNNING
