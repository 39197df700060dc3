"""Links between hosts that are cut while their ranks save, and what may come of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from helpers.ranks import trials as ranks_trials
from helpers.ranks.hosts import Hosts
from helpers.ranks.jobs import Job, Sent
from helpers.ranks.trials import Reference, Strike, Trial

GRACE, MARGIN = 8.0, 20.0  # the margin is for a machine with other things to do: a hang is for ever
CONFIGURED = {"LASTCALL_GRACE_SECONDS": str(GRACE), "LASTCALL_HANG_SECONDS": "3", "LASTCALL_ON_HANG": "exit"}


@dataclass(frozen=True)
class Cut:
    """A notice, and a link that is cut `delay` seconds after it, or after the first file of a save; mended
    later if told so."""

    hosts: Hosts
    directory: Path
    strike: Strike
    host: int
    delay: float
    in_save: bool = False
    mended: float | None = None

    def land(self, job: Job) -> list[Sent]:
        sent = self.strike.land(job)
        assert sent, f"nothing to cut: it was over before\n{job.log()}"
        if self.in_save:
            staging = self.directory / ".lastcall" / "staging"
            job.until_true(lambda: any(staging.glob("*/*")) or job.over(), "the beginning of a save")
        assert not job.over(), f"nothing to cut: it was over before\n{job.log()}"
        time.sleep(self.delay)
        self.hosts.cut(self.host)
        if self.mended is not None:
            time.sleep(self.mended)
            self.hosts.mend(self.host)
        return sent


def check(trial: Trial, expected: Reference) -> None:
    """Nothing is torn, and the end is that of the run in peace, unless a record says why it may not be."""
    if all(record["exact"] for life in trial.lives for record in life.committed):
        ranks_trials.check(trial, expected, most_lost=1)
    else:
        # one side saved alone: the small state of the other's ranks was out of reach, and the record says so
        ends = [lines[-1].state["parameters"] for lines in trial.lives[-1].journals.values()]
        assert len(set(ends)) == 1, trial.story()
