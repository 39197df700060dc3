"""`lastcall run` in jobs of a real Slurm: every way in which Slurm ends a job, and whether the job comes
back."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes.forkserver import environment
from lastcall import testing
from slurm import cluster as clusters
from slurm.cluster import Cluster, Job

TRAIN = Path(__file__).with_name("train.py")
STEPS = 400  # more than the first life, which is slow, does in the minute of its time limit
LAUNCH = f"{sys.executable} -m lastcall run --cloud none --"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if missing := clusters.missing():
        pytest.fail(
            f"{', '.join(missing)} not found. Run: apt-get update && apt-get install -y slurm-wlm munge"
        )
    with Cluster() as running:
        yield running


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run that nobody stopped comes to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [sys.executable, str(TRAIN), str(folder / "run"), str(folder / "result"), str(STEPS)]
    plain = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
    subprocess.run(command, env=plain, check=True, capture_output=True, timeout=120)
    return (folder / "result").read_text()


@pytest.fixture(scope="module", autouse=True)
def early(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """The jobs that have to wait for their time limit (the shortest is a minute) wait while the other tests
    run."""
    jobs = {}
    for name, options in {"signal": ["--signal=B:TERM@20"], "allocation": []}.items():
        path = tmp_path_factory.mktemp(name)
        # A second life that is slow on a busy machine must not come to its time limit.
        more = '[ -z "$SLURM_RESTART_COUNT" ] || scontrol update JobId="$SLURM_JOB_ID" TimeLimit=10'
        script = f"{more}\nexec {LAUNCH} {training(path)}"
        lead = {"LASTCALL_SLURM_LEAD_SECONDS": "0"} if name == "signal" else {}
        jobs[name] = submit(cluster, path, "--time=1", "--partition=high", *options, script=script, **lead)
    return jobs


@pytest.fixture(scope="module")
def preempted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Three jobs, and a fourth that needs the place of all of them."""
    jobs = {}
    for name, partition in {"batch": "low", "step": "low", "for good": "lowest"}.items():
        path = tmp_path_factory.mktemp(name)
        script = f"srun --ntasks=1 {LAUNCH} {training(path)}" if name == "step" else ""
        jobs[name] = submit(
            cluster, path, f"--partition={partition}", f"--cpus-per-task={clusters.CPUS // 4}", script=script
        )
    for job in jobs.values():
        job.expect("at 3")
    cluster.submit(
        tmp_path_factory.mktemp("other"),
        "true",
        "--partition=high",
        f"--cpus-per-task={clusters.CPUS * 3 // 4 + 1}",
    )
    return jobs


def training(folder: Path) -> str:
    return shlex.join([sys.executable, str(TRAIN), str(folder / "run"), str(folder / "result"), str(STEPS)])


def submit(cluster: Cluster, folder: Path, *options: object, script: str = "", **env: str) -> Job:
    script = script or f"exec {LAUNCH} {training(folder)}"
    return cluster.submit(folder, script, "--requeue", *options, LASTCALL_KILL_WAIT_SECONDS="0", **env)


def came_back(job: Job, reason: str, uninterrupted: str) -> None:
    """Stopped once, saved, run again by Slurm, and ended as if nothing had happened."""
    job.expect("life 1 resumed")
    assert job.wait() == "COMPLETED 0:0", job.log()
    assert [line.split()[1] for line in job.lines() if line.startswith("life")] == ["0", "1"]
    (first, second) = (line.split()[-1] for line in job.lines() if line.startswith("life"))
    assert (first, second) == ("None", str(saved(job.folder, reason)))
    assert job.fields()["Restarts"] == "1"
    assert (job.folder / "result").read_text() == uninterrupted
    assert requests(job) == [], job.log()


def saved(folder: Path, reason: str) -> int:
    """The step that was saved because of the notice."""
    jit = [
        entry
        for path in folder.glob("run/*/lastcall.json")
        if (entry := json.loads(path.read_text()))["kind"] == "jit"
    ]
    (record,) = jit
    assert reason in record["reason"]
    step: int = record["step"]
    return step


def requests(job: Job) -> list[Path]:
    return sorted(job.folder.glob("lastcall-requeue-*"))


def test_a_signal_to_the_batch_script_saves_requeues_and_resumes(
    cluster: Cluster, tmp_path: Path, uninterrupted: str
) -> None:
    job = submit(cluster, tmp_path, "--partition=low")
    job.expect("at 3")
    job.signal(signal.SIGTERM)
    came_back(job, "SIGTERM", uninterrupted)
    assert f"Requeued job {job.number}; waiting for the kill" in job.log()
    assert "Slurm has not ended this job" not in job.log()


def test_a_preempted_batch_script_saves_and_is_requeued_by_slurm_itself(
    preempted: dict[str, Job], uninterrupted: str
) -> None:
    """At the beginning of the grace Slurm signals steps, not the batch script: this job hears of it at the
    end, with KillWait left."""
    job = preempted["batch"]
    came_back(job, "SIGTERM", uninterrupted)
    assert f"Slurm has already requeued job {job.number}" in job.log()
    assert "DUE TO PREEMPTION" in job.log()


def test_a_preempted_step_saves_at_the_beginning_of_the_grace(
    preempted: dict[str, Job], uninterrupted: str
) -> None:
    job = preempted["step"]
    came_back(job, "SIGTERM", uninterrupted)
    assert f"Requeued job {job.number}; waiting for the kill" in job.log()
    assert "DUE TO PREEMPTION" not in job.log()  # it had left before the grace was over


def test_a_job_that_is_preempted_for_good_asks_to_come_back(
    preempted: dict[str, Job], uninterrupted: str
) -> None:
    """PreemptMode=CANCEL, and no grace but KillWait."""
    job = preempted["for good"]
    came_back(job, "SIGTERM", uninterrupted)
    assert f"Requeued job {job.number}; leaving" in job.log()
    assert "DUE TO PREEMPTION" in job.log()


def test_a_job_that_somebody_cancels_saves_and_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "--partition=low")
    job.expect("at 3")
    job.cancel()
    assert job.wait().startswith("CANCELLED"), job.log()
    testing.assert_resumable(tmp_path / "run", exact=True)
    assert f"Job {job.number} is being cancelled: not requeued" in job.log()
    time.sleep(2)  # nothing can be waited for that must not happen
    assert job.fields()["Restarts"] == "0"
    assert requests(job) == []


def test_a_requeue_by_somebody_else_is_not_repeated(
    cluster: Cluster, tmp_path: Path, uninterrupted: str
) -> None:
    """Here a shell stays above the launcher. Slurm tells them all: the training hears the signal twice."""
    job = submit(cluster, tmp_path, "--partition=low", script=f"{LAUNCH} {training(tmp_path)}\nexit $?")
    job.expect("at 3")
    cluster.command("scontrol", "requeue", job.number)
    came_back(job, "SIGTERM", uninterrupted)
    assert f"Slurm has already requeued job {job.number}" in job.log()


def test_without_scontrol_a_request_is_written_that_brings_the_job_back(
    cluster: Cluster, tmp_path: Path, uninterrupted: str
) -> None:
    """A task of an array: the request is for this one."""
    script = f"export PATH=/nowhere\nexec {LAUNCH} {training(tmp_path)}"
    job = submit(cluster, tmp_path, "--partition=low", "--array=5", script=script)
    job.number += "_5"
    job.expect("at 3")
    job.signal(signal.SIGTERM)
    assert job.wait() == "FAILED 75:0", job.log()
    (path,) = requests(job)
    assert path.name == f"lastcall-requeue-{job.number}"
    assert f"scontrol is not in PATH. The request is in {path}" in job.log()
    request = json.loads(path.read_text())
    path.unlink()
    assert cluster.command(*shlex.split(request["command"])).returncode == 0
    came_back(job, "SIGTERM", uninterrupted)


def test_a_job_that_may_not_be_requeued_leaves_a_request_with_slurms_own_words(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, "--partition=low", "--no-requeue")
    job.expect("at 3")
    job.signal(signal.SIGTERM)
    assert job.wait() == "FAILED 75:0", job.log()
    testing.assert_resumable(tmp_path / "run", exact=True)
    (path,) = requests(job)
    assert "Requested operation is presently disabled" in json.loads(path.read_text())["because"]


def test_slurms_signal_before_the_time_limit_saves_and_requeues(
    early: dict[str, Job], uninterrupted: str
) -> None:
    job = early["signal"]
    came_back(job, "SIGTERM", uninterrupted)
    assert "DUE TO TIME LIMIT" not in job.log()


def test_the_end_of_the_allocation_is_a_notice_without_any_signal(
    early: dict[str, Job], uninterrupted: str
) -> None:
    job = early["allocation"]
    came_back(job, "the allocation ends at", uninterrupted)
    assert "s before its end instead of 120 s" in job.log()
    assert "DUE TO TIME LIMIT" not in job.log()
