"""Is the run restarted: the exit code that the platform gets, and what the platform does with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from lastcall import settings
from lastcall.doctor import finding
from lastcall.doctor.checks import grace
from lastcall.doctor.finding import Finding
from lastcall.launch.platforms import Platform
from lastcall.launch.shell.commandline import Launch

_POLICY = (
    "restartPolicy cannot be detected from inside: it must be OnFailure or Always, or the owner of the pod "
    "must replace it"
)


def check_codes(launch: Launch) -> Iterator[Finding]:
    """A shell around the training may turn every exit code into 0, which means that training finished."""
    swallowed = False
    for script in launch.shells:
        lost = script.swallows()
        if lost is None:
            continue
        swallowed = True
        training = script.training
        where = (
            script.name if training is None or script.path is None else f"{script.path}, line {training.line}"
        )
        yield finding.risk(
            "exit-code",
            f"{where}: {lost.why}. A run that was saved and stopped looks finished, and is not restarted",
            f"lastcall run -- {launch.text}, which keeps the code; or end the script with the training "
            "itself: exec ...",
            script=script.path,
        )
    if launch.given and not swallowed:
        yield finding.ok("exit-code", "the exit code of the training reaches the platform")


def check_platform(
    platform: Platform,
    why: str,
    launch: Launch,
    jit: settings.JITCheckpointConfig,
    environ: Mapping[str, str],
) -> Finding:
    given = jit.origins()["exit_code"] != "default"
    code = jit.exit_code if given or not launch.wrapped else platform.exit_code
    facts = {"platform": platform.name, "because": why, "exit_code": code}
    if platform.name == "slurm":
        return _slurm(launch, environ, facts)
    if code != platform.exit_code and not launch.wrapped and platform.name == "htcondor":
        return finding.risk(
            "platform",
            f"HTCondor runs a job again after exit code {platform.exit_code}, but a saved run exits with "
            f"code {code}",
            f"export LASTCALL_EXIT_CODE={platform.exit_code}; and in the submit file: checkpoint_exit_code = "
            f"{platform.exit_code}",
            **facts,
        )
    after = f"{platform.name} ({why}); a saved run exits with code {code}"
    if platform.name in ("kubernetes", "runai"):
        return finding.ok("platform", f"{after}. {_POLICY}", **facts)
    if platform.name == "htcondor":
        return finding.ok("platform", f"{after}, which HTCondor treats as a checkpoint", **facts)
    return finding.ok(
        "platform",
        f"no platform that restarts runs was detected ({why}); a saved run exits with code {code}",
        **facts,
    )


def _slurm(launch: Launch, environ: Mapping[str, str], facts: dict[str, object]) -> Finding:
    job = environ.get("SLURM_JOB_ID", "")
    answer = grace.ask("show", "job", job, "-o", environ=environ) or ""
    requeue = re.search(r"\bRequeue=(\d)", answer)
    facts = {**facts, "requeue": None if requeue is None else requeue[1] == "1"}
    if requeue is not None and requeue[1] == "0":
        return finding.risk(
            "platform",
            f"Slurm does not requeue job {job} (Requeue=0): a saved run is not restarted",
            f"scontrol update JobId={job} Requeue=1; next time: #SBATCH --requeue",
            **facts,
        )
    if launch.given and not launch.wrapped:
        return finding.warning(
            "platform",
            "Slurm does not restart a job because of its exit code: it must be requeued",
            f"lastcall run -- {launch.text}, which requeues it",
            **facts,
        )
    known = "allows it" if requeue is not None else "does not say whether that is allowed (no scontrol here)"
    return finding.ok(
        "platform", f"slurm, job {job}: lastcall run requeues it after a save; Slurm {known}", **facts
    )
