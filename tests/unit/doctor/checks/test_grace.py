from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from lastcall import settings
from lastcall.core.checkpoint.record import Record
from lastcall.doctor.checks import capacity, grace, restart, rundir
from lastcall.doctor.checks.grace import Expected
from lastcall.doctor.checks.storage import Speed
from lastcall.doctor.finding import Case, Finding
from lastcall.launch import platforms
from lastcall.launch.shell import commandline
from lastcall.types import FileRecord, Kind

NOTHING = commandline.Launch()
ROOT = Path("/runs/x")


def saved(
    step: int, seconds: float, written: int = 10**9, missing: tuple[str, ...] = ()
) -> rundir.Checkpoint:
    files = (FileRecord("model.safetensors", written, "", 4096, ()),)
    record = Record(
        step, step, Kind.JIT, "test", True, files, seconds=seconds, written=written, missing=missing
    )
    return rundir.Checkpoint(ROOT / f"checkpoint-{step}", "valid", "", record)


def jit(**values: float) -> settings.JITCheckpointConfig:
    return settings.JITCheckpointConfig(environ={}, **values)  # type: ignore[arg-type]


def levels(findings: object) -> list[str]:
    return [item.level for item in findings]  # type: ignore[attr-defined]


def needs(seconds: float | None) -> Expected:
    return Expected(None if seconds is None else 10**9, seconds, "test")


# ---- what a save needs -------------------------------------------------------------------------------------


def test_a_save_is_expected_to_take_what_the_slowest_of_the_newest_took() -> None:
    known = rundir.Directory(ROOT, (saved(40, 2.0), saved(30, 9.0), saved(20, 3.0), saved(10, 100.0)))
    expected = grace.expect(Case({}), known, None)
    assert (expected.nbytes, expected.seconds) == (10**9, 9.0) and "checkpoint-30" in expected.because


def test_partial_and_damaged_checkpoints_say_nothing_of_the_time() -> None:
    damaged = dataclasses.replace(saved(40, 50.0), status="damaged")
    known = rundir.Directory(
        ROOT, (damaged, saved(30, 99.0, missing=("optimizer.safetensors",)), saved(20, 3.0))
    )
    assert grace.expect(Case({}), known, None).seconds == 3.0


def test_a_size_is_turned_into_time_by_what_was_measured() -> None:
    case = Case({}, size=10 * 10**9)
    measured = grace.expect(case, None, Speed(10**9, 1.0))
    assert measured.seconds == pytest.approx(0.25 + 1.3 * 10)
    earlier = grace.expect(case, rundir.Directory(ROOT, (saved(10, 2.0),)), None)
    assert earlier.seconds == pytest.approx(0.25 + 1.3 * 20) and "earlier saves" in earlier.because
    assert "assumed" in grace.expect(case, None, None).because


def test_without_a_checkpoint_and_a_size_the_time_is_unknown() -> None:
    assert grace.expect(Case({}), None, None).seconds is None
    found = grace.check_grace(jit(), needs(None), Speed(10**9, 1.0))
    assert found.level == "ok" and "20.0 GB fit" in found.says


# ---- against the limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "level"),
    [(5.0, "ok"), (26.0, "ok"), (28.0, "warning"), (29.4, "warning"), (29.6, "risk"), (90.0, "risk")],
)
def test_the_grace_must_hold_the_save_and_should_hold_the_kill_wait(seconds: float, level: str) -> None:
    found = grace.check_grace(jit(grace=30.0, kill_wait=3.0), needs(seconds), None)
    assert found.level == level
    if level == "risk":
        assert "export LASTCALL_GRACE_SECONDS=" in found.remedy


def test_the_grace_that_the_remedy_names_is_enough() -> None:
    found = grace.check_grace(jit(grace=30.0), needs(90.0), None)
    named = float(found.remedy.split("LASTCALL_GRACE_SECONDS=")[1].split(",")[0])
    assert grace.check_grace(jit(grace=named), needs(90.0), None).level == "ok"


def test_the_platforms_grace_is_told_or_assumed() -> None:
    def found(
        grace_seconds: float, told: float | None, seconds: float | None = None, platform: str = "kubernetes"
    ) -> list[Finding]:
        return list(
            grace.check_platform(
                Case({}, termination_grace=told), jit(grace=grace_seconds), needs(seconds), platform
            )
        )

    assert levels(found(30, None)) == ["ok"]
    assert levels(found(120, None)) == ["warning"]
    assert (
        "cannot be detected" in found(120, None)[0].says
        and "--termination-grace" in found(120, None)[0].remedy
    )
    assert levels(found(120, None, seconds=60)) == ["risk"]
    assert levels(found(120, 130)) == ["ok"]
    assert levels(found(120, 60)) == levels(found(120, 60, platform="plain")) == ["risk"]
    assert found(30, None, platform="slurm") == []


@pytest.mark.skipif(not os.path.exists("/.dockerenv"), reason="not in a container of Docker")
def test_docker_stop_kills_after_ten_seconds() -> None:
    (found,) = grace.check_platform(Case({}), jit(), needs(None), "plain")
    assert found.level == "warning" and "--stop-timeout 40" in found.remedy


def test_torchrun_alone_is_a_warning_and_with_a_long_save_a_risk() -> None:
    def level(command: str, seconds: float | None, **environ: str) -> list[str]:
        launch = commandline.understand(tuple(command.split()), {})
        return levels(grace.check_torchrun(launch, jit(grace=120), needs(seconds), environ))

    assert (
        level("torchrun train.py", 40)
        == level("python -m torch.distributed.run train.py", 40)
        == level("accelerate launch x.py", 40)
        == ["risk"]
    )
    assert level("torchrun --shutdown-timeout 300 train.py", 40) == ["risk"]
    assert level("torchrun train.py", 28) == ["risk"]  # with the kill wait
    assert level("torchrun train.py", 5) == level("torchrun train.py", None) == ["warning"]
    # torchrun itself is patient then; its exit code stays 1
    assert level("torchrun train.py", 40, LASTCALL_ENABLED="1") == ["warning"]
    assert level("lastcall run -- torchrun train.py", 40) == ["ok"]
    assert level("python train.py", 40) == []


# ---- Slurm, as its own command answers ---------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/sh\ncase "$2" in\nconfig) echo "KillWait                = 45 sec";;\njob) echo "JobId=7 '
        'Requeue=$REQUEUE X=1";;\nesac\n'
    )
    program.chmod(0o755)
    return {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:/usr/bin:/bin", "REQUEUE": "1"}


def test_kill_wait_is_asked_for(slurm: dict[str, str]) -> None:
    assert levels(grace.check_slurm(NOTHING, needs(40), slurm)) == ["ok"]
    assert levels(grace.check_slurm(NOTHING, needs(50), slurm)) == ["risk"]
    around = commandline.understand(("lastcall", "run", "--", "python", "x.py"), {})
    # it begins two minutes before the end
    assert levels(grace.check_slurm(around, needs(50), slurm)) == ["ok"]
    without = {**slurm, "PATH": "/nowhere"}
    assert levels(grace.check_slurm(NOTHING, needs(40), without)) == ["risk"]  # the default of 30 s
    assert list(grace.check_slurm(NOTHING, needs(40), {})) == []


def test_an_allocation_that_ends_before_a_save_would_is_found(slurm: dict[str, str]) -> None:
    ends = {**slurm, "SLURM_JOB_END_TIME": "1000"}
    assert levels(grace.check_slurm(NOTHING, needs(20), ends, now=990.0)) == ["risk"]
    assert levels(grace.check_slurm(NOTHING, needs(20), ends, now=900.0)) == ["ok"]
    assert levels(grace.check_slurm(NOTHING, needs(None), ends, now=990.0)) == ["ok"]


def test_a_job_that_slurm_does_not_requeue_is_found(slurm: dict[str, str]) -> None:
    platform, why = platforms.choose("auto", slurm)
    around = commandline.understand(("lastcall", "run", "--", "python", "x.py"), {})
    alone = commandline.understand(("python", "x.py"), {})

    def level(launch: commandline.Launch, **environ: str) -> str:
        return restart.check_platform(platform, why, launch, jit(), {**slurm, **environ}).level

    assert level(around) == level(NOTHING) == "ok"
    assert level(alone) == "warning"
    assert level(around, REQUEUE="0") == "risk"
    assert level(around, PATH="/nowhere") == "ok"


def test_a_scontrol_that_fails_is_like_none(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    assert grace.ask("show", "config", environ={"PATH": f"{tmp_path}:/bin"}) is None
    program.write_text("not a program")
    assert grace.ask("show", "config", environ={"PATH": f"{tmp_path}:/bin"}) is None


# ---- coming back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "command", "level", "code"),
    [
        ({}, "python x.py", "ok", 75),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "python x.py", "ok", 75),
        ({"RUNAI_JOB_NAME": "x"}, "lastcall run -- python x.py", "ok", 1),
        ({"_CONDOR_JOB_AD": "x"}, "python x.py", "risk", 75),
        ({"_CONDOR_JOB_AD": "x"}, "lastcall run -- python x.py", "ok", 85),
    ],
)
def test_the_exit_code_must_be_the_platforms(
    environ: dict[str, str], command: str, level: str, code: int
) -> None:
    platform, why = platforms.choose("auto", environ)
    found = restart.check_platform(
        platform, why, commandline.understand(tuple(command.split()), {}), jit(), environ
    )
    assert (found.level, found.facts["exit_code"]) == (level, code)


def test_a_swallowed_exit_code_is_told_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "entry.sh"
    script.write_text("#!/bin/bash\n\nlastcall run -- python x.py || true\n")
    (found,) = restart.check_codes(commandline.understand(("bash", str(script)), {}))
    assert found.level == "risk" and f"{script}, line 3" in found.says
    assert levels(
        restart.check_codes(commandline.understand(("lastcall", "run", "--", "bash", str(script)), {}))
    ) == ["ok"]
    assert list(restart.check_codes(NOTHING)) == []


# ---- memory ------------------------------------------------------------------------------------------------


def test_shared_memory_must_hold_two_copies(tmp_path: Path) -> None:
    def found(folder: Path, state: int | None) -> Finding:
        return capacity.check_shared(
            settings.JITCheckpointConfig(environ={"LASTCALL_GUARD_FOLDER": str(folder)}), state
        )

    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert found(tmp_path, None).level == found(tmp_path, 1000).level == "ok"
    assert found(tmp_path, free * 6 // 10).level == "risk"
    missing = found(tmp_path / "missing", 1000)
    assert missing.level == "risk" and "cannot be used" in missing.says


def test_a_group_that_is_killed_as_a_whole_takes_the_guardian_along(tmp_path: Path) -> None:
    assert list(capacity.check_group(True, tmp_path)) == []  # no such file: another kernel
    (tmp_path / "memory.oom.group").write_text("1\n")
    assert levels(capacity.check_group(True, tmp_path)) == ["warning"]
    assert list(capacity.check_group(False, tmp_path)) == []
    (tmp_path / "memory.oom.group").write_text("0\n")
    assert list(capacity.check_group(True, tmp_path)) == []


def test_no_room_for_the_copy_of_a_periodic_save_is_a_warning() -> None:
    assert capacity.check_memory(1 << 60, periodic=True).level == "warning"
    assert (
        capacity.check_memory(1 << 60, periodic=False).level
        == capacity.check_memory(1000, periodic=True).level
        == "ok"
    )
