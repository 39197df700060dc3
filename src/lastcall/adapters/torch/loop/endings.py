"""How a run ended, and what the next one in its directory learns: an early stop trains on, a finished one has
nothing left to do, a second one in the same process is usually another run (a fold, a trial) that was given
the first one's place."""

from __future__ import annotations

import logging
from pathlib import Path

from lastcall import settings
from lastcall.core.checkpoint.record import Entry
from lastcall.core.notice.ending import FINISHED

log = logging.getLogger("lastcall")
LEFT_EARLY = "the loop was left"  # begins the reason of a last checkpoint that is not the end
_here: set[Path] = set()  # directories of runs that have finished in this process


def finished(directory: Path) -> None:
    _here.add(directory.resolve())


def again(directory: Path) -> bool:
    """Whether this process has finished a run there before. Asked once: the next one learns it again."""
    place = directory.resolve()
    known = place in _here
    _here.discard(place)
    return known


def reason(over: bool | None, step: int, steps: int | None, epoch: int, epochs: int | None) -> str:
    """For the record of the last checkpoint. `over`: the loop came to its end, as far as that is known."""
    if over is not False:
        return FINISHED
    return f"{LEFT_EARLY} at step {step}" + (
        f" of {steps}" if epochs is None else f", in epoch {epoch} of {epochs}"
    )


def announce(directory: Path, entry: Entry, repeated: bool) -> bool:
    """Say what the last one did. True if it left its loop early."""
    if entry.record.reason.startswith(LEFT_EARLY):
        log.warning(
            "The last incarnation ended early: %s (an early stop?). This one continues from there. If it "
            "should not, check first: "
            "`if not run.left_early:`",
            entry.record.reason,
        )
        return True
    if repeated:
        log.warning(
            "This process has already finished a run in %s: this one continues from its end", directory
        )
    return False


def nothing_left(directory: Path, step: int, repeated: bool) -> None:
    """The loop begins behind its end."""
    where = f"the run in {directory} has finished at step {step}"
    if repeated:
        settings.fail(
            f"{where}, in this very process, and nothing is left to train: this one would only get its "
            "weights. Give each run (each "
            f"fold, each trial) a directory of its own: protect({str(directory / 'fold-1')!r}, ...)"
        )
    log.info(
        "Nothing left to do: %s. To train longer, ask for more steps; to start over, use another directory",
        where,
    )
