"""What `lastcall drill --prove` prints: the verdict and the reasons for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lastcall.cli import output

if TYPE_CHECKING:
    from lastcall.drill.proof import Difference, ProofVerdict

_SHOWN = 5
_PROVED, _NOT_PROVED, _DIFFERENT, _NOTHING = "Identical", "NOT PROVED", "DIFFERENT", "Nothing was proved"
FIELDS = {  # of its JSON
    "identical": "whether the two runs are the same at every step compared",
    "proved": "identical, and every checkpoint on the way was exact",
    "steps": "steps of each run",
    "compared": "steps compared after the resume",
    "names": "how many names were compared",
    "resumed": "the checkpoints that it resumed from",
    "differences": "rank, step, name, undisturbed and resumed of each difference",
    "cause": "what is probably missing, or null",
    "uncertain": "names left out since they differ from run to run",
}


def word(verdict: ProofVerdict) -> str:
    """How its first line begins."""
    if verdict.problem is not None:
        return _NOTHING
    return _PROVED if verdict.proved else _NOT_PROVED if verdict.identical else _DIFFERENT


def lines(verdict: ProofVerdict) -> Iterator[str]:
    from lastcall.drill import causes

    if verdict.problem is not None:
        yield f"{_NOTHING}: {verdict.problem}"
    elif verdict.identical:
        compared = output.plural(verdict.compared, "step")
        found = f"{verdict.names} names compared at {compared} after the resume"
        if verdict.proved:
            yield f"{_PROVED} after {verdict.steps} steps: {found}"
        else:
            yield f"{_NOT_PROVED}, although identical up to now, after {verdict.steps} steps: {found}"
            yield from _not_exact(verdict)
    else:
        first = verdict.differences[0]
        yield f"{_DIFFERENT} from step {first.step} on{_of_rank(verdict, first)}:"
        for one in verdict.differences[:_SHOWN]:
            yield (
                f"  {one.name} is {causes.shown(one.resumed)}; without the preemption it is "
                f"{causes.shown(one.undisturbed)}"
            )
        if (more := len(verdict.differences) - _SHOWN) > 0:
            yield f"  ... and {more} more"
        yield f"Probably missing: {verdict.cause}"
    if verdict.uncertain and verdict.problem is None:
        told = ", ".join(verdict.uncertain[:_SHOWN]) + (" ..." if len(verdict.uncertain) > _SHOWN else "")
        yield f"Not compared, since it differs from run to run: {told}"
    if verdict.log is not None:
        yield f"The command's output is in {verdict.log}"


def _not_exact(verdict: ProofVerdict) -> Iterator[str]:
    for checkpoint in verdict.resumed:
        if not checkpoint.exact:
            yield (
                f"{checkpoint.name} is marked as not exact ({checkpoint.because}): a difference may show in "
                "later steps"
            )


def _of_rank(verdict: ProofVerdict, one: Difference) -> str:
    return f" (rank {one.rank})" if one.rank else ""


def to_json(verdict: ProofVerdict) -> dict[str, Any]:
    return {
        "schema": 1,
        "identical": verdict.identical,
        "proved": verdict.proved,
        "problem": verdict.problem,
        "command": list(verdict.options.command),
        "steps": verdict.steps,
        "compared": verdict.compared,
        "names": verdict.names,
        "resumed": [dataclasses.asdict(one) for one in verdict.resumed],
        "differences": [dataclasses.asdict(one) for one in verdict.differences],
        "cause": verdict.cause or None,
        "uncertain": verdict.uncertain,
        "log": None if verdict.log is None else str(verdict.log),
    }
