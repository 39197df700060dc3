from __future__ import annotations

from pathlib import Path

import pytest

from lastcall import settings
from lastcall.doctor.checks import ray
from lastcall.doctor.checks.grace import Expected
from lastcall.doctor.finding import Case, Finding
from lastcall.launch.shell import commandline

NEWEST = "2.60.0"
UNKNOWN = Expected(None, None, "no checkpoint has been saved yet")
SCRIPT = """
from ray.train import RunConfig
from ray.train.torch import TorchTrainer
TorchTrainer(print, run_config=RunConfig({})).fit()
"""


def jit(**environ: str) -> settings.JITCheckpointConfig:
    return settings.JITCheckpointConfig(environ=environ)


def launch(folder: Path, config: str) -> commandline.Launch:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(config))
    return commandline.understand(("python", str(script)), {})


def found(findings: object) -> dict[str, Finding]:
    return {item.name: item for item in findings}  # type: ignore[attr-defined]


# ---- whether Ray is meant at all ---------------------------------------------------------------------------


def test_nothing_is_said_of_ray_where_nothing_is_rays() -> None:
    assert not list(ray.check(Case({}), commandline.Launch(), jit(), UNKNOWN, NEWEST))


def test_a_script_that_imports_ray_train_is_enough(tmp_path: Path) -> None:
    said = found(
        ray.check(Case({}), launch(tmp_path, "name='a', storage_path='s3://b/c'"), jit(), UNKNOWN, NEWEST)
    )
    assert list(said) == ["ray", "ray-drain", "ray-polls", "ray-name", "ray-storage"]


def test_a_script_that_cannot_be_parsed_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from ray import train\n!")
    assert ray.read(commandline.understand(("python", str(tmp_path / "train.py")), {})) is None


# ---- versions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "level"),
    [(None, "risk"), ("2.40.0", "risk"), ("2.51.1", "warning"), (NEWEST, "ok"), ("3.1.0", "warning")],
)
def test_each_version_of_ray_has_its_verdict(version: str | None, level: str) -> None:
    said = ray.check_version(version)
    assert (said.level, bool(said.remedy)) == (level, level != "ok")


# ---- the time that a node has ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "drain", "level"),
    [
        (None, None, "warning"),  # 30 s each, by default
        (120.0, "110", "ok"),
        (30.0, "30", "warning"),
        (30.0, "110", "risk"),
        (120.0, "0", "risk"),
        (120.0, "no number", "ok"),
    ],
)
def test_the_drain_must_end_before_the_pod_is_killed(
    told: float | None, drain: str | None, level: str
) -> None:
    environ = {} if drain is None else {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": drain}
    assert ray.check_drain(Case(environ, termination_grace=told), NEWEST).level == level


def test_the_remedy_gives_the_pod_ten_seconds_more_than_the_drain() -> None:
    remedy = ray.check_drain(Case({}), NEWEST).remedy
    assert (
        "terminationGracePeriodSeconds: 120" in remedy
        and "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=110" in remedy
    )


def test_a_ray_whose_nodes_do_not_drain_is_a_risk_whatever_the_pod_has() -> None:
    assert ray.check_drain(Case({}, termination_grace=600.0), "2.56.0").level == "risk"


# ---- how often Ray looks -----------------------------------------------------------------------------------


def test_polls_that_fit_into_the_drain_are_all_right() -> None:
    said = ray.check_polls({}, jit(), Expected(10**9, 5.0, "test"))
    assert said.level == "ok" and said.facts["needs"] == pytest.approx(1.0 + 3.0 + 5.0 + 4.0)


def test_polls_and_a_save_that_take_longer_than_the_drain_are_a_risk() -> None:
    said = ray.check_polls({"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "10"}, jit(), Expected(10**9, 8.0, "test"))
    assert said.level == "risk" and "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.5" in said.remedy


def test_without_rays_watcher_no_drain_is_heard() -> None:
    assert ray.check_polls({"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}, jit(), UNKNOWN).level == "risk"


# ---- whether a job that is submitted again goes on ---------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ("name='exp1'", "ok"),
        ("", "warning"),
        ("name=None", "warning"),
        ("**options", "ok"),
        ("name=args.name", "ok"),
    ],
)
def test_a_run_without_a_name_starts_from_scratch_when_its_job_is_submitted_again(
    tmp_path: Path, config: str, level: str
) -> None:
    configured = ray.read(launch(tmp_path, config))
    assert configured is not None
    assert ray.check_name(configured, jit(), {}).level == level


def test_a_name_may_come_from_the_environment(tmp_path: Path) -> None:
    configured = ray.read(launch(tmp_path, ""))
    assert configured is not None
    assert ray.check_name(configured, jit(LASTCALL_RUN_ID="exp1"), {}).level == "ok"
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "nightly"}}'}
    assert "nightly" in ray.check_name(configured, jit(), job).says


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ("name='a'", "risk"),  # ~/ray_results
        ("storage_path='s3://bucket/runs'", "ok"),
        ("storage_path='/proc/runs'", "risk"),
        ("storage_path=args.storage", "ok"),
    ],
)
def test_checkpoints_must_go_where_they_outlive_the_pod(tmp_path: Path, config: str, level: str) -> None:
    configured = ray.read(launch(tmp_path, config))
    assert configured is not None
    assert ray.check_storage(configured).level == level
