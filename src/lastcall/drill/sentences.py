"""The lines that are shown during a drill."""

from __future__ import annotations

from collections.abc import Sequence

from lastcall.drill.incarnation import Incarnation
from lastcall.drill.report import DirectoryRound, DrillRound, Gone
from lastcall.launch import processes

_NOT_PROTECTED = "this run is not protected: it would lose everything since the last checkpoint of its own"
_REMEDY = (
    "Wrap the training loop in lastcall.protect() (see examples/plain.py), make sure that LASTCALL_ENABLED "
    "is not 0, and drill a "
    "command whose training processes run on this machine, below it"
)


def ending(gone: Gone, parts: Sequence[DirectoryRound]) -> str:
    """How an incarnation ended."""
    said = []
    for item in parts:
        begins, committed = item.traces.save_begins, item.traces.committed
        if begins is not None:
            said.append(f"save began after {begins - gone.sent:.2f} s")
        if item.saved is not None:
            exact = "exact" if item.saved.exact else "not exact"
            after = "" if committed is None else f" after {committed - gone.sent:.2f} s"
            said.append(f"{item.saved.name} ({item.saved.kind}, {exact}) committed{after}")
        else:
            said.append("nothing committed")
    how = (
        f"killed at the end of the grace, after {gone.seconds:.2f} s"
        if gone.killed
        else f"gone after {gone.seconds:.2f} s"
    )
    return f"{', '.join(said)}; {how}, {gone.died_of or f'exit code {gone.exit}'}"


def back(round: DrillRound) -> str:
    """How the next incarnation started."""
    if not round.back.came:
        return f"did not resume: {round.back.because}"
    origins = {item.resumed.name if item.resumed else "scratch" for item in round.parts}
    first = (
        "finished at once"
        if round.back.first_step is None
        else f"first new step after {round.back.first_step:.1f} s"
    )
    return (
        f"resumed from {', '.join(sorted(origins))}, {first}; "
        f"{'nothing lost' if round.ok else '; '.join(round.reasons)}"
    )


def last_words(life: Incarnation) -> str:
    """The last lines of the command's output, to append to a sentence."""
    lines = [line for line in life.tail() if line.strip()]
    return f". Last lines of its output: {' | '.join(lines)}" if lines else ""


def no_step(life: Incarnation, patience: float) -> str:
    """Why an incarnation does not train."""
    code = life.process.poll()
    if code == 0 and not life.members:
        return (
            f"the command ended, and no process below it has used lastcall: {_NOT_PROTECTED}. "
            f"{_REMEDY}{last_words(life)}"
        )
    if code is not None:
        return f"it exited with {processes.described(code)} before a first step{last_words(life)}"
    if not life.members:
        return (
            f"in {patience:g} s no process below the command has used lastcall: {_NOT_PROTECTED}. {_REMEDY}. "
            "If it only takes longer to start, use --patience SECONDS"
        )
    return f"no step was completed in {patience:g} s. If the first one takes longer, use --patience SECONDS"


def finished_early(number: int) -> str:
    return (
        f"the run finished before the notice of round {number}. Give it more steps, fewer rounds (--times), "
        "an earlier moment "
        "(--at, --after), or a fresh directory if an earlier run has finished in this one"
    )


def left_early(number: int, life: Incarnation) -> str:
    code = life.process.returncode
    return (
        f"the run exited before the notice of round {number}, with "
        f"{processes.described(code)}{last_words(life)}"
    )
