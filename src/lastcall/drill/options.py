"""The options of `lastcall drill`."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

TO = ("child", "group", "training")
EARLIEST, LATEST = 2.0, 10.0  # the default range for a notice, in seconds after the first step


@dataclass(frozen=True)
class DrillOptions:
    command: tuple[str, ...]
    at: int | None = None
    """Preempt round n when the run is at n times this step."""
    after: float | None = None
    """Seconds after the first step of each incarnation. With neither: a random moment."""
    grace: float = 30.0
    signum: int = signal.SIGTERM
    to: str = "child"
    """Which processes get the signal: the command's own process as from a container runtime, its process
    group, or the training processes."""
    times: int = 1
    patience: float = 300.0
    """Seconds without a first or a further step after which the drill gives up."""
    to_the_end: bool = False
    log: Path | None = None
    """Where the command's output goes; None: a file that is kept only when something was lost."""

    @property
    def signal_name(self) -> str:
        return signal.Signals(self.signum).name
