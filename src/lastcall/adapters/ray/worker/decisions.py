"""From what the ranks report to what all of them do, with the reason. Pure functions: the decision of one
rank is that of all.

native     the script handles a preemption itself (get_preemption_info): all of it is left to the script
framework  a Trainer saves at the end of a step
own        the script's own save, entered as though its condition were true
replay     the script's own save statements, run at a step boundary: batches may be repeated, never skipped
period     no save of the script's can be entered, but it has checkpoints of its own (Lightning reports them
           from a callback): training continues until the next one
state      the script has no checkpoints at all: what the optimizers hold, in a format of ours
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lastcall import messages

NATIVE, FRAMEWORK, OWN, REPLAY, PERIOD, STATE = "native", "framework", "own", "replay", "period", "state"
_SLACK = 1.5  # a pass may take that much longer than the one before
_LEAST = 2.0  # seconds that the script's own save point gets at least

Answers = Mapping[int, Mapping[str, Any]]


def first(answers: Answers, left: float) -> dict[str, Any]:
    """`left`: seconds in which the save must have begun."""
    step = max(int(answer["step"]) for answer in answers.values()) + 1
    if any(answer.get("native") for answer in answers.values()):
        return {
            "step": step,
            "how": NATIVE,
            "within": left,
            "because": "the script handles a preemption itself",
        }
    if all(answer.get("framework") for answer in answers.values()):
        return {
            "step": step,
            "how": FRAMEWORK,
            "within": left,
            "because": "the Trainer saves at the end of a step",
        }
    if not all(answer.get("looked") for answer in answers.values()):
        return _own(step, max(left / 2, min(left, _LEAST)), "training has not reached its first step yet")
    if not all(answer.get("points") for answer in answers.values()):
        return _state(step, left, answers)
    if all(answer.get("near") for answer in answers.values()):
        return _own(step, left, "the script's own save point is passed at every step")
    known = [float(answer["seconds"]) for answer in answers.values() if answer.get("seconds") is not None]
    if not known:
        return _own(
            step,
            max(left / 2, min(left, _LEAST)),
            "it is not known how far away the script's own save point is",
        )
    expected = max(known)
    if expected > left:
        return _replay(
            step,
            left,
            f"the script's own save point is about {expected:.0f} s away, and {left:.0f} s are left",
        )
    return _own(
        step,
        min(left, _SLACK * expected + _LEAST),
        f"the script's own save point is about {expected:.0f} s away",
    )


def again(answers: Answers, left: float) -> dict[str, Any]:
    """The script's own save point was not reached in time. A rank that is in it already stays there, and the
    others join it."""
    step = max(int(answer["step"]) for answer in answers.values()) + 1
    if any(answer.get("inside") for answer in answers.values()):
        return _own(step, left, "a rank is in the script's own save already")
    if not all(answer.get("points") for answer in answers.values()):
        return _state(step, left, answers)
    return _replay(step, left, "the script's own save point was not reached in time")


def report(answers: Answers, size: int) -> dict[str, Any]:
    """A report() after the notice: which ranks take part, and which have a checkpoint. One that a rank had
    passed before its notice came is not the save: that rank trains on."""
    passed = any(answer.get("passed") for answer in answers.values())
    saving = [] if passed else sorted(rank for rank, answer in answers.items() if answer.get("checkpoint"))
    replayed = {bool(answer.get("replayed")) for rank, answer in answers.items() if rank in saving}
    failed = {rank: str(answer["failed"]) for rank, answer in answers.items() if answer.get("failed")}
    return {
        "missing": sorted(set(range(size)) - set(answers) | set(failed)),
        "failed": "; ".join(dict.fromkeys(failed.values())),  # why a rank takes part and has no checkpoint
        "saving": saving,
        # one part is of the script's own save point, another one of a step before it
        "torn": len(replayed) > 1,
        "files": sorted({tuple(answers[rank].get("files", ())) for rank in saving}),
    }


def flaw(settled: Mapping[str, Any], previous: Sequence[str] | None) -> str:
    """Why the living ranks have no whole checkpoint, as far as that can be known; empty if they have one.
    `previous`: the files of the checkpoint before."""
    files = settled["files"]
    if settled["torn"]:
        return "its parts are of different steps"
    if len(files) > 1:
        return (
            f"each rank has files of its own, and those of {messages.named(settled['missing'])} are missing"
        )
    if files and previous is not None and set(previous) != set(files[0]):
        return "the checkpoint before it had other files"
    return ""


def _own(step: int, within: float, because: str) -> dict[str, Any]:
    return {"step": step, "how": OWN, "within": within, "because": because}


def _replay(step: int, left: float, because: str) -> dict[str, Any]:
    return {"step": step, "how": REPLAY, "within": left, "because": because}


def _state(step: int, left: float, answers: Answers) -> dict[str, Any]:
    without_save = (answer for answer in answers.values() if not answer.get("points"))
    reasons = [str(answer["because"]) for answer in without_save if answer.get("because")]
    because = reasons[0] if reasons else "no save was found"
    if any(answer.get("checkpoints") for answer in answers.values()):
        return {
            "step": step,
            "how": PERIOD,
            "within": left,
            "because": f"{because}; waiting for the script's next checkpoint",
        }
    return {"step": step, "how": STATE, "within": left, "because": because}
