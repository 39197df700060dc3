"""The end of a Slurm allocation: known from the start, and not announced by a signal unless the job requested
one (--signal=B:TERM@120).

At the end Slurm sends SIGTERM and, KillWait seconds later (30 by default, an administrator's choice),
SIGKILL. A save that needs longer than that has to start before the end: `lead` seconds before.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from lastcall import clock as clocks
from lastcall.notices import polling
from lastcall.notices.polling import log

LEAD = 120.0
# seconds: administrators extend time limits, and a preemption with a GraceTime shows nowhere else
_READ_AGAIN = 60.0
_SCONTROL_SECONDS = 5.0


class Slurm(polling.Poller):
    name = "slurm"
    title = "The end of the Slurm allocation"
    most = _READ_AGAIN

    def __init__(
        self,
        job: str,
        end: float | None,
        scontrol: str | None,
        *,
        lead: float = LEAD,
        clock: clocks.Clock | None = None,
    ) -> None:
        super().__init__(clock)
        self.end = end  # seconds since 1970
        self._job = job
        self._scontrol = scontrol
        self._wanted = lead
        self._lead: float | None = None

    @classmethod
    def of_environment(
        cls, environ: Mapping[str, str], lead: float = LEAD, clock: clocks.Clock | None = None
    ) -> Slurm | None:
        """None outside of an allocation, or if its end is unknown."""
        job = environ.get("SLURM_JOB_ID", "").strip()
        if not job:
            return None
        end = _seconds(environ.get("SLURM_JOB_END_TIME", ""))
        scontrol = shutil.which("scontrol", path=environ.get("PATH"))
        if end is None and scontrol is None:
            log.warning(
                "The end of Slurm job %s is unknown: neither SLURM_JOB_END_TIME nor scontrol is available. "
                "Request a signal before it: "
                "#SBATCH --signal=B:TERM@120",
                job,
            )
            return None
        return cls(job, end, scontrol, lead=lead, clock=clock)

    def look(self) -> float:
        self._read_again()
        if self.end is None:
            return _READ_AGAIN  # no limit, until one is set
        left = self.end - self.clock.wall()
        lead = self._affordable(left)
        if left > lead:
            return min(left - lead, _READ_AGAIN)
        self.tell(
            f"the allocation ends at {polling.shown(self.end)}", polling.monotonic(self.clock, self.end)
        )
        return polling.DONE

    def _affordable(self, left: float) -> float:
        """A job shorter than the lead would stop at its first step, be requeued, and stop again, forever."""
        if self._lead is None:
            self._lead = max(0.0, min(self._wanted, left / 2))
            if self._lead < self._wanted:
                log.warning(
                    "Only %.0f s are left of the Slurm allocation: the notice will come %.0f s before its "
                    "end instead of %.0f s",
                    left,
                    self._lead,
                    self._wanted,
                )
        return self._lead

    def _read_again(self) -> None:
        if self._scontrol is None:
            return
        try:
            known, end = end_time(self._ask())
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            if self.end is None:
                raise polling.Trouble("scontrol", f"cannot be read from scontrol: {error}") from error
            self.warn(
                "scontrol",
                "scontrol does not report when the Slurm allocation ends (%s): still assuming %s",
                error,
                polling.shown(self.end),
            )
            return
        if known:
            self.end = end

    def _ask(self) -> str:
        command = [str(self._scontrol), "show", "job", self._job, "-o"]
        # Seconds since 1970 are independent of time zones; an scontrol that does not know the format prints
        # local time.
        environ = {**os.environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
        result = subprocess.run(
            command,
            capture_output=True,
            timeout=_SCONTROL_SECONDS,
            env=environ,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if result.returncode != 0:
            raise ValueError(
                f"exit code {result.returncode}, {result.stderr.decode(errors='replace').strip()[:200]}"
            )
        return result.stdout.decode(errors="replace")


def end_time(text: str) -> tuple[bool, float | None]:
    """Whether `scontrol show job -o` knows the end, and the end: None for a job without a limit."""
    found = re.search(r"(?:^|\s)EndTime=(\S+)", text)
    if found is None:
        raise ValueError("no EndTime in its answer")
    value = found[1]
    if value in ("Unknown", "None", "NONE", "N/A"):
        return True, None
    number = _seconds(value)
    if number is not None:
        return True, number
    try:
        # local time, as this machine knows it
        return True, datetime.datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"EndTime={value} is not a time") from None


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,12}", text.strip()) else None
