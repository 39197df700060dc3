"""The time between a notice and the kill, compared with what a save needs: as configured in lastcall,
torchrun and the platform."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lastcall import clock as clocks
from lastcall import settings
from lastcall.core import timing
from lastcall.core.process.throughput import amount
from lastcall.core.save import budget
from lastcall.doctor import finding
from lastcall.doctor.checks.rundir import Directory
from lastcall.doctor.checks.storage import Speed
from lastcall.doctor.finding import Case, Finding
from lastcall.launch.shell.commandline import Launch

KUBERNETES = 30.0  # terminationGracePeriodSeconds, unless the pod says otherwise
_DOCKER = 10.0  # docker stop, unless told otherwise
# PContext.close, which most shutdown paths use whatever --shutdown-timeout says (torch 2.4 to 2.13)
_TORCHRUN = 30.0
_KILL_WAIT = 30.0  # Slurm's
_SAVES = 3  # how many of the newest checkpoints are considered


@dataclass(frozen=True)
class Expected:
    """The next save."""

    nbytes: int | None
    seconds: float | None
    because: str


def expect(case: Case, known: Directory | None, speed: Speed | None) -> Expected:
    """From the existing checkpoints; from --size and the measured bandwidth, if --size is given."""
    saves = [record for record in (known.records if known else ())[:_SAVES] if record.complete]
    guess = budget.Budget(clocks.Clock())
    how = f"at an assumed {budget.ASSUMED / 1e6:.0f} MB/s"
    for record in reversed(saves):
        guess.observe(record.written, record.seconds)
    if guess.measured:
        how = f"at the {guess.bandwidth / 1e6:.0f} MB/s of earlier saves"
    if speed is not None:
        guess = budget.Budget(clocks.Clock())
        guess.observe(speed.nbytes, speed.seconds)
        how = f"at the measured {guess.bandwidth / 1e6:.0f} MB/s"
    if case.size is not None:
        return Expected(case.size, guess.seconds(case.size), f"{amount(case.size)} {how}")
    if not saves:
        return Expected(None, None, "no checkpoint has been saved yet")
    slowest = max(saves, key=lambda record: record.seconds)
    return Expected(
        saves[0].size, slowest.seconds, f"checkpoint-{slowest.step} took {finding.seconds(slowest.seconds)}"
    )


def check_grace(jit: settings.JITCheckpointConfig, expected: Expected, speed: Speed | None) -> Finding:
    facts = {
        "grace": jit.grace,
        "kill_wait": jit.kill_wait,
        "save_seconds": expected.seconds,
        "because": expected.because,
    }
    grace, wait = finding.seconds(jit.grace), finding.seconds(jit.kill_wait)
    if expected.seconds is None:
        fits = (
            ""
            if speed is None
            else f"; about {amount(max(jit.grace - jit.kill_wait - 1, 0) * speed.bandwidth / budget.SAFETY)} "
            "fit into it"
        )
        return finding.ok(
            "grace",
            f"{grace}, of which the kill wait takes {wait}; the time that a save needs is not known "
            f"yet{fits}",
            **facts,
        )
    needs = finding.seconds(expected.seconds)
    enough = int(expected.seconds * budget.SAFETY + jit.kill_wait) + 2
    remedy = (
        f"export LASTCALL_GRACE_SECONDS={enough}, and give the platform as much: "
        f"terminationGracePeriodSeconds: {enough + 10}"
    )
    if expected.seconds + timing.MARGIN > jit.grace:
        return finding.risk(
            "grace",
            f"a save needs {needs} ({expected.because}), the grace is {grace}: the save will not complete",
            remedy,
            **facts,
        )
    if expected.seconds + jit.kill_wait + timing.MARGIN > jit.grace:
        return finding.warning(
            "grace",
            f"a save needs {needs} ({expected.because}), the kill wait is {wait}, the grace {grace}: the "
            "wait will be cut short",
            f"export LASTCALL_KILL_WAIT_SECONDS=0; or: {remedy}",
            **facts,
        )
    return finding.ok(
        "grace", f"{grace} hold the kill wait of {wait} and a save of {needs} ({expected.because})", **facts
    )


def check_platform(
    case: Case, jit: settings.JITCheckpointConfig, expected: Expected, platform: str
) -> Iterator[Finding]:
    """The platform's grace, which cannot be detected from inside a container: given with an option, or
    assumed."""
    if case.termination_grace is not None:
        limit, whose, told = case.termination_grace, "the platform", True
    elif platform in ("kubernetes", "runai"):
        limit, whose, told = (
            KUBERNETES,
            "Kubernetes (terminationGracePeriodSeconds cannot be detected from inside; assumed)",
            False,
        )
    elif platform == "plain" and os.path.exists("/.dockerenv"):
        limit, whose, told = (
            _DOCKER,
            "docker stop (its --stop-timeout cannot be detected from inside; assumed)",
            False,
        )
    else:
        return
    facts = {"limit": limit, "told": told, "grace": jit.grace}
    says = (
        f"{whose} kills after {finding.seconds(limit)}, but the configured grace is "
        f"{finding.seconds(jit.grace)}"
    )
    less = f"export LASTCALL_GRACE_SECONDS={max(limit - 2, 1):g}"
    remedy = f"terminationGracePeriodSeconds: {int(jit.grace) + 10} in the pod's spec, or: {less}"
    if whose.startswith("docker"):
        remedy = (
            f"docker run --stop-timeout {int(jit.grace) + 10} ...; then tell the doctor: --termination-grace "
            f"{int(jit.grace) + 10}"
        )
    elif not told:
        remedy += (
            f"; if the pod already has more, pass it to the doctor: --termination-grace {int(jit.grace) + 10}"
        )
    if jit.grace <= limit:
        yield finding.ok("platform-grace", f"{whose} gives {finding.seconds(limit)}", **facts)
    elif told or (expected.seconds is not None and expected.seconds > limit):
        yield finding.risk("platform-grace", says, remedy, **facts)
    else:
        yield finding.warning("platform-grace", says, remedy, **facts)


def check_torchrun(
    launch: Launch, jit: settings.JITCheckpointConfig, expected: Expected, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """torchrun kills its workers itself and turns every exit code into 1."""
    if not launch.torchrun:
        return
    remedy = f"lastcall run -- {launch.text}"
    asked = launch.option("--shutdown-timeout") or environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    facts = {
        "limit": _TORCHRUN,
        "shutdown_timeout": asked,
        "wrapped": launch.wrapped,
        "save_seconds": expected.seconds,
    }
    if launch.wrapped:
        yield finding.ok(
            "torchrun",
            "lastcall run is above torchrun: the workers get the whole grace, and the exit code is preserved",
            **facts,
        )
        return
    # With LASTCALL_ENABLED=1 the bootstrap lengthens the timeout inside torchrun (auto/torchrun.py); it
    # cannot fix the exit code.
    patched = environ.get("LASTCALL_ENABLED", "").strip().lower() in ("1", "true", "yes", "on")
    needs = None if expected.seconds is None else expected.seconds + min(jit.kill_wait, _TORCHRUN)
    if needs is not None and needs > _TORCHRUN and not patched:
        but = f" (the timeout of {asked} s is not used when a worker ends first)" if asked else ""
        yield finding.risk(
            "torchrun",
            f"torchrun kills its workers after {finding.seconds(_TORCHRUN)}{but}; a save needs "
            f"{finding.seconds(needs)} "
            f"with the kill wait ({expected.because})",
            remedy,
            **facts,
        )
    else:
        yield finding.warning(
            "torchrun",
            "torchrun without lastcall run: every exit code becomes 1"
            + (
                ""
                if patched
                else f", and workers are killed after {finding.seconds(_TORCHRUN)} whatever the grace"
            ),
            remedy,
            **facts,
        )


def check_slurm(
    launch: Launch, expected: Expected, environ: Mapping[str, str], now: float | None = None
) -> Iterator[Finding]:
    """At the end of an allocation Slurm sends SIGTERM, and SIGKILL KillWait seconds later."""
    if not environ.get("SLURM_JOB_ID"):
        return
    asked = re.search(r"KillWait\s*=\s*(\d+)", ask("show", "config", environ=environ) or "")
    wait = float(asked[1]) if asked else _KILL_WAIT
    end = environ.get("SLURM_JOB_END_TIME", "")
    left = float(end) - (time.time() if now is None else now) if end.isdigit() else None
    facts = {"kill_wait": wait, "left": left, "save_seconds": expected.seconds}
    if left is not None and left < (expected.seconds or 0.0):
        yield finding.risk(
            "slurm",
            f"the allocation ends in {finding.seconds(max(left, 0))}, a save needs "
            f"{finding.seconds(expected.seconds or 0.0)}",
            f"scontrol update JobId={environ['SLURM_JOB_ID']} TimeLimit=+60",
            **facts,
        )
    elif expected.seconds is not None and expected.seconds > wait and not launch.wrapped:
        yield finding.risk(
            "slurm",
            f"Slurm kills {finding.seconds(wait)} after SIGTERM (KillWait), a save needs "
            f"{finding.seconds(expected.seconds)}",
            f"lastcall run -- {launch.text or 'COMMAND'}, which saves two minutes before the end; or, with "
            "exec "
            f"in front of the command: #SBATCH --signal=B:TERM@{int(expected.seconds) + 60}",
            **facts,
        )
    else:
        how = "KillWait" if asked else "KillWait is unknown; the default"
        yield finding.ok("slurm", f"Slurm kills {finding.seconds(wait)} after SIGTERM ({how})", **facts)


def ask(*words: str, environ: Mapping[str, str]) -> str | None:
    """scontrol's answer; None if it is missing or does not answer."""
    program = shutil.which("scontrol", path=environ.get("PATH"))
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *words],
            capture_output=True,
            text=True,
            timeout=5.0,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
