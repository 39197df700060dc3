"""The options of `lastcall run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RESTARTS = ("on-preempt", "on-failure", "never")


@dataclass(frozen=True)
class LaunchOptions:
    command: tuple[str, ...]
    grace: float = 30.0
    """Seconds between a notice and the kill, unless the notice itself says."""
    grace_given: bool = False
    """Whether the user set it. A guessed grace must not kill a program that is not known to train."""
    kill_after: float | None = None
    """Seconds after a notice until everything left is killed, training processes that are still saving
    included; None spares these."""
    stop_file: Path | None = None
    cloud: str = "auto"
    platform: str = "auto"
    exit_code: int | None = None
    """The code of a saved run; None: what the platform needs."""
    restart: str = "never"
    max_restarts: int = 10
    backoff: float = 1.0
    """Seconds before the first restart; doubled for each further one without progress, up to a minute."""
    linger: float = 60.0
    """Slurm: seconds to wait for the kill after a successful requeue."""
    resume_args: str | None = None
    """Arguments that a restart gets, with {path} for the checkpoint: for scripts that resume from a path
    only."""
    guard: bool = False
    guard_steps: int | None = None
    guard_seconds: float | None = None
    auto: bool = True
    """Whether lastcall is enabled in the Python processes below without a change to their code."""
    log_level: str = "INFO"
    log_level_given: bool = False
