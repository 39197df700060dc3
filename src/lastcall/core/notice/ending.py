"""Log messages about how training ended, the same for one process and for many ranks."""

from __future__ import annotations

import logging

from lastcall import errors
from lastcall.core.checkpoint.record import Entry
from lastcall.core.context import RunContext
from lastcall.types import Kind, Outcome

log = logging.getLogger("lastcall")
FINISHED = "training finished"


def say(context: RunContext, reason: str, entry: Entry) -> None:
    step = context.subject.step
    ended = f"Training finished at step {step}" if reason == FINISHED else f"{reason[:1].upper()}{reason[1:]}"
    log.info("%s; saved %s", ended, entry.path.name)


def not_saved(context: RunContext, error: Exception) -> errors.SaveError:
    """Training is over, and its result is in memory only: that must not count as finished."""
    step = context.subject.step
    if not context.outcome.saved:  # a rescue that was committed meanwhile answers the notice all the same
        context.outcome.decide(Outcome.NOT_SAVED if context.latch.raised else Outcome.FAILED)
    context.events.emit("not-saved", save=Kind.FINAL.value, step=step, because=str(error))
    message = (
        f"The final checkpoint was not saved, so the end of training (step {step}) is lost with this "
        f"process: {error}"
    )
    log.error("%s", message)
    return errors.SaveError(message)


def named(error: BaseException) -> str:
    """What left the block, in the terms of the script."""
    if isinstance(error, SystemExit):
        return "sys.exit()"
    return "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__


def described(error: BaseException) -> str:
    """The same with its message, in one line."""
    return (
        " ".join(f"{named(error)}: {error}".split())[:200] if isinstance(error, Exception) else named(error)
    )
