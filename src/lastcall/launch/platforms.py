"""The platforms that restart a run, each with the exit code that it needs, and Slurm, where the job must be
requeued explicitly."""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("lastcall")
REQUEUE_FILE = "LASTCALL_REQUEUE_FILE"
_SCONTROL_SECONDS = 20.0


@dataclass(frozen=True)
class Platform:
    name: str
    exit_code: int  # of a run that saved and is to be run again
    variables: tuple[str, ...] = ()  # any of these variables identifies it
    prefix: str = ""  # or any with this prefix


# In the order of detection: Run:ai runs on Kubernetes, so Kubernetes' variables are set as well.
PLATFORMS = (
    # its training workloads are retried after any failure; 75 has no meaning of its own there
    Platform("runai", 1, prefix="RUNAI_"),
    Platform("kubernetes", 75, ("KUBERNETES_SERVICE_HOST",)),
    Platform("slurm", 75, ("SLURM_JOB_ID",)),
    # checkpoint_exit_code of its self-checkpointing jobs
    Platform("htcondor", 85, ("_CONDOR_JOB_AD", "_CONDOR_SCRATCH_DIR")),
    Platform("plain", 75),
)
NAMES = tuple(platform.name for platform in PLATFORMS)


def choose(name: str, environ: Mapping[str, str]) -> tuple[Platform, str]:
    """The platform, and how it was detected."""
    for platform in PLATFORMS:
        if name == platform.name:
            return platform, "--platform"
        if name != "auto":
            continue
        signs = [variable for variable in platform.variables if environ.get(variable)]
        if platform.prefix:
            signs += sorted(variable for variable in environ if variable.startswith(platform.prefix))
        if signs:
            return platform, f"{signs[0]} is set"
    return PLATFORMS[-1], "no other platform detected"


def job(environ: Mapping[str, str]) -> str | None:
    """What Slurm calls this job; of an array, this one task."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


def requeue(environ: Mapping[str, str]) -> bool:
    """Ask Slurm to run the job again. True if its kill is still to come; False if there is nothing to wait
    for: Slurm could not be asked (then a request file says so), or it is already ending the job."""
    name = job(environ)
    if name is None:
        log.warning(
            "No requeue: SLURM_JOB_ID is not set. Run inside a Slurm job, or choose another --platform"
        )
        return False
    if environ.get("SLURM_PROCID", "0") != "0":
        log.info("The first task requeues job %s", name)
        return False
    standing = _standing(name, environ)
    if standing is Standing.CANCELLED:
        log.info("Job %s is being cancelled: not requeued. To continue it: scontrol requeue %s", name, name)
        return False
    if standing is Standing.REQUEUED:
        log.info("Slurm has already requeued job %s", name)
        return False
    failure = _requeue(name, environ)
    if failure is None:
        log.info(
            "Requeued job %s; %s", name, "leaving" if standing is Standing.ENDING else "waiting for the kill"
        )
        return standing is not Standing.ENDING
    _write_request(name, failure, environ)
    return False


class Standing(enum.Enum):
    """What Slurm is about to do with the job."""

    RUNNING = "running"  # nothing, or unknown
    ENDING = "ending"  # its time is over, or it is preempted and would not be requeued automatically
    # end it and run it again: a preemption with PreemptMode=REQUEUE, or a person's `scontrol requeue`
    REQUEUED = "requeued"
    # end it: a person's `scancel`. Slurm would run it again if we asked, and it could never be cancelled
    CANCELLED = "cancelled"


def standing(text: str, restarts: int) -> Standing:
    """From `scontrol show job -o`. `restarts` is what the job was started with: SLURM_RESTART_COUNT."""
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    if fields.get("Restarts", "").isdigit() and int(fields["Restarts"]) > restarts:
        return Standing.REQUEUED
    # the first hides every other state: CANCELLED, TIMEOUT, PREEMPTED
    if fields.get("JobState") not in ("COMPLETING", "CANCELLED"):
        return Standing.RUNNING
    if fields.get("Reason") == "TimeLimit" or fields.get("PreemptTime", "None") != "None":
        return Standing.ENDING
    return Standing.CANCELLED


def _standing(name: str, environ: Mapping[str, str]) -> Standing:
    done = _scontrol(environ, "show", "job", name, "-o")
    count = environ.get("SLURM_RESTART_COUNT", "")
    return (
        Standing.RUNNING
        if isinstance(done, str)
        else standing(done.stdout, int(count) if count.isdigit() else 0)
    )


def _requeue(name: str, environ: Mapping[str, str]) -> str | None:
    """None once Slurm has agreed; otherwise why not."""
    done = _scontrol(environ, "requeue", name)
    if isinstance(done, str):
        return done
    return (
        None
        if done.returncode == 0
        else f"scontrol: {(done.stderr or done.stdout).strip() or f'exit code {done.returncode}'!r}"
    )


def _scontrol(environ: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str] | str:
    """The answer, or the reason why there is none."""
    program = shutil.which("scontrol", path=environ.get("PATH"))
    if program is None:
        return "scontrol is not in PATH"
    try:
        return subprocess.run(
            [program, *words],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            env=dict(environ),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"scontrol did not answer: {error}"


def _write_request(name: str, failure: str, environ: Mapping[str, str]) -> None:
    path = request_file(name, environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(
                {"job": name, "command": f"scontrol requeue {name}", "at": time.time(), "because": failure}
            )
            + "\n"
        )
    except OSError as error:
        log.error(
            "Job %s is not requeued: %s; and the request could not be written: %s. Run: scontrol requeue %s",
            name,
            failure,
            error,
            name,
        )
    else:
        log.warning(
            "Job %s is not requeued: %s. The request is in %s; run: scontrol requeue %s",
            name,
            failure,
            path,
            name,
        )


def request_file(name: str, environ: Mapping[str, str]) -> Path:
    chosen = environ.get(REQUEUE_FILE)
    return (
        Path(chosen)
        if chosen
        else Path(environ.get("SLURM_SUBMIT_DIR") or os.getcwd()) / f"lastcall-requeue-{name}"
    )
