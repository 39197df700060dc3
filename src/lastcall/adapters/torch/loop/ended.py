"""A run that had finished by a loop of the script's own, and trains again.

Only the script knows when such a loop is over. What it carried is put back, so that a loop that asks in its
head ends at once when the run is started again after its end. One that asks behind its step has made one step
more by then, and one whose counter is set inside the block makes them all: neither may happen in silence.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from lastcall.adapters.torch.carry import flow, frames, places
from lastcall.core.checkpoint.doubts import Doubts
from lastcall.script.source.scopes import Loop, below

log = logging.getLogger("lastcall")
Returned = frozenset[str]
_LEAVES = (ast.Break, ast.Return)


def trains_again(
    around: Iterable[tuple[places.Place, Returned]], directory: Path, step: int, doubts: Doubts
) -> None:
    """Called at the first step of such a run. `around`: where the script's frames stand, with the names that
    were put back. `step`: where the run had finished."""
    loops = [(place, loop, names) for place, names in around for loop in place.loops]
    ended = f"the run in {directory} had finished at step {step}"
    if not any(_asks_first(place, loop, names) for place, loop, names in loops):
        where = f" ({frames.place(loops[-1][0].code, loops[-1][1].lineno)})" if loops else ""
        doubts.add(
            f"the run had finished at step {step}, and was started again: its loop{where} trains further "
            "before it asks whether it is over",
            "Let the head of the loop ask the run: `while run.step < n:`, or use `run.batches(loader)`.",
        )
    elif any(isinstance(each, _LEAVES) for _, loop, _ in loops for each in below(loop)):
        log.warning(
            "%s: this start trains further from there. If it should not (an early stop?), check in the head "
            "of the loop what ended it",
            ended[:1].upper() + ended[1:],
        )
    else:
        log.info("%s: this start trains further from there", ended[:1].upper() + ended[1:])


def _asks_first(place: places.Place, loop: Loop, returned: Returned) -> bool:
    """Whether a pass of the loop has asked for something that is as the finished run has left it, before it
    came here."""
    if places.head_reads(loop, places.READ_AGAIN):
        return True
    if not isinstance(loop, ast.While):
        counted = flow.reads(loop.iter) & flow.assigned(loop)
        return bool(counted) and counted <= returned
    tests = [] if isinstance(loop.test, ast.Constant) else [loop.test]
    tests += [each.test for each in _ifs(loop) if _leaves_before(each, place.line)]
    return any(flow.reads(test) & flow.assigned(loop) <= returned for test in tests)


def _ifs(loop: Loop) -> Iterator[ast.If]:
    return (each for each in loop.body if isinstance(each, ast.If))


def _leaves_before(statement: ast.If, line: int) -> bool:
    return any(isinstance(each, _LEAVES) and each.lineno < line for each in below(statement))
