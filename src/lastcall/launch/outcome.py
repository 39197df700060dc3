"""The one exit code that tells the platform what happened, with the reason for it.

Programs between the training and the launcher have exit codes of their own: torchrun turns every code into 1,
a shell returns that of its last command. So the outcomes recorded by the training processes come first, and
the command's code counts only where there is none.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from lastcall import errors
from lastcall.core.process import exits
from lastcall.core.process.registry import Member
from lastcall.launch import processes
from lastcall.launch.supervisor import Ending
from lastcall.types import Notice, Outcome

_PERSON = 128 + signal.SIGINT


class Result(enum.Enum):
    """Decides whether the run is restarted."""

    ENDED = "ended"  # finished, or an unprotected command that exits with 0
    SAVED = "saved"  # stopped with everything committed: run it again
    # by a person, by a notice without a checkpoint, or by a wrong setting: running it again here does not
    # help
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class ExitVerdict:
    result: Result
    code: int
    because: str
    crashed: bool = False  # nothing asked it to stop


def decide(ending: Ending, exit_code: int, rescued: Sequence[str] = ()) -> ExitVerdict:
    """`exit_code` is the platform's code of a saved run; `rescued` are the checkpoints that the guardian has
    committed since."""
    ending = dataclasses.replace(ending, members=tuple(last_word(ending.members)))
    own = shell_code(ending.status)
    said = processes.described(ending.status)
    if own == errors.EXIT_CONFIG:
        return ExitVerdict(
            Result.STOPPED, own, _refused(ending) or "a setting is wrong; the message is above"
        )
    if own == _PERSON or (ending.interrupted and ending.members and own != 0):
        return ExitVerdict(Result.STOPPED, _PERSON, "interrupted by a person")
    if rescued:
        because = f"the guardian saved {', '.join(rescued)} (command: {said})"
        return ExitVerdict(Result.SAVED, exit_code, because, crashed=ending.notice is None)
    saved = [member for member in ending.members if member.outcome == Outcome.SAVED.value]
    lost = unsaved(ending.members)
    taken = [member for member in lost if member.outcome in (None, Outcome.NOT_SAVED.value)]
    failed = [member for member in ending.members if member.outcome == Outcome.FAILED.value]
    if saved and failed and ending.notice is None and own != 0:
        # A rank raised, and all saved: still an error, which would happen again.
        who = processes.names([member.pid for member in failed])
        return ExitVerdict(
            Result.FAILED, own, f"training {who} failed; the run is saved (command: {said})", crashed=True
        )
    if saved and not taken:
        if ending.interrupted:
            return ExitVerdict(Result.STOPPED, _PERSON, "interrupted by a person; the run is saved")
        if stays := next((member.stays for member in saved if member.stays), ""):
            notice = ending.notice or Notice("signal", "SIGTERM", 0.0, None, _signal_of(ending))
            return ExitVerdict(
                Result.STOPPED, exits.code(notice, False, 0), f"stopped and saved, but {stays}"
            )
        what = ", ".join(
            sorted({f"{os.path.basename(m.root)}/{m.checkpoint}" if m.checkpoint else m.root for m in saved})
        )
        return ExitVerdict(Result.SAVED, exit_code, f"stopped and saved in {what} (command: {said})")
    if taken and (ending.notice is not None or any(member.outcome is not None for member in taken)):
        return _not_saved(ending, taken)
    if own != 0 and ending.notice is not None and ending.members and not lost:
        # The notice came after training had finished and ended the rest of the command: everything is
        # committed.
        return ExitVerdict(
            Result.SAVED,
            exit_code,
            f"training had finished, but {ending.notice.reason} ended the command ({said})",
        )
    if ending.notice is not None and not (ending.members or ending.elsewhere) and (own == 0 or ending.agents):
        # No training process responded. A 0 would mean that training finished, and torchrun always returns 1.
        code = 128 + (ending.notice.signum or signal.SIGTERM)
        because = f"got {ending.notice.reason}, but no process of the command was protected"
        return ExitVerdict(Result.STOPPED, code, f"{because} (command: {said})")
    if own != 0 and ending.notice is None and _refused(ending):
        return ExitVerdict(Result.STOPPED, errors.EXIT_CONFIG, f"{_refused(ending)} (command: {said})")
    if own != 0:
        crashed = ending.notice is None and not ending.interrupted
        return ExitVerdict(
            Result.FAILED if crashed else Result.STOPPED, own, f"the command ended with {said}", crashed
        )
    return _masked(ending, lost)


def _refused(ending: Ending) -> str:
    """Why training could not start, where a process reported a reason."""
    began = any(member.step > (member.resumed or 0) for member in ending.members)
    return (
        f"training cannot start, and a retry would not help: {ending.refused[0]}"
        if ending.refused and not began
        else ""
    )


def _not_saved(ending: Ending, lost: Sequence[Member]) -> ExitVerdict:
    notice = ending.notice or Notice("signal", "SIGTERM", 0.0, None, _signal_of(ending))
    code = exits.code(notice, False, 0)
    who = processes.names([member.pid for member in lost])
    return ExitVerdict(Result.STOPPED, code, f"got {notice.reason}, and {who} saved no checkpoint")


def _masked(ending: Ending, lost: Sequence[Member]) -> ExitVerdict:
    """The command exited with 0. A failed training process overrides that: exit code 0 means that training
    finished."""
    masked = [member for member in lost if member.pid != ending.pid and member.outcome != Outcome.LEFT.value]
    unjoined = {pid: code for pid, code in ending.left.items() if code != 0}
    if unjoined and not ending.members:
        who, code = processes.names(unjoined), next(iter(unjoined.values()))
        because = f"the command ended with exit code 0, but {who} below it with {processes.described(code)}"
        return ExitVerdict(Result.FAILED, shell_code(code), because, True)
    left = [member for member in ending.members if member.outcome == Outcome.LEFT.value]
    if left and not masked:
        steps = ", ".join(sorted({str(member.step) for member in left}))
        return ExitVerdict(
            Result.ENDED,
            0,
            f"the script exited on its own at step {steps}; training is not known to have finished",
        )
    if not masked:
        return ExitVerdict(
            Result.ENDED, 0, "training finished" if ending.members else "the command ended with exit code 0"
        )
    codes = [shell_code(code) for member in masked if (code := ending.statuses.get(member.pid, 0)) != 0]
    who = processes.names([member.pid for member in masked])
    how = "failed" if all(member.outcome for member in masked) else "was killed"
    return ExitVerdict(
        Result.FAILED,
        codes[0] if codes else 1,
        f"the command ended with exit code 0, but training {who} {how}",
        True,
    )


def last_word(members: Sequence[Member]) -> list[Member]:
    """Leaves out those whose run others have finished since: torchrun restarts its workers on its own."""
    finished = [member for member in members if member.outcome == Outcome.FINISHED.value]
    ends = {
        root: max(member.started for member in finished if member.root == root)
        for root in {member.root for member in finished}
    }
    return [
        member
        for member in members
        if member.outcome == Outcome.FINISHED.value or member.started >= ends.get(member.root, member.started)
    ]


def unsaved(members: Sequence[Member]) -> list[Member]:
    """The training processes whose run did not end well. Of those that share a directory (ranks, or
    successive processes), one good end is enough, because a checkpoint holds the whole run or does not
    exist."""
    good = {
        member.root for member in members if member.outcome in (Outcome.SAVED.value, Outcome.FINISHED.value)
    }
    return [member for member in members if member.root not in good]


def shell_code(status: int) -> int:
    """A return code as a shell reports it."""
    return status if status >= 0 else 128 - status


def _signal_of(ending: Ending) -> int:
    """The signal that ended an unsaved run, where the notice went to that process and not to the launcher."""
    for status in (ending.status, *ending.statuses.values()):
        if status < 0:
            return -status
        if status > 128:  # as a shell reports it
            return status - 128
    return int(signal.SIGTERM)
