"""Ways in which a script comes to its steps that leave something behind where nothing can be put back: on the
stack of a call."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

from lastcall.adapters.torch.carry import frames, places
from lastcall.core.checkpoint.doubts import Doubts


def check_iterator(frame: FrameType, found: Mapping[str, Mapping[str, Any]], doubts: Doubts) -> None:
    """An iterator of the script's own around run.batches() that counts before it asks for the next batch: in
    a resumed epoch it has counted once before anything can be put back. `found`: what changes from step to
    step."""
    if frame.f_code.co_name != "__next__":
        return
    place = places.of(frame)
    counted = (
        places.changed_before(place) & found.get(f"{place.key}: {frame.f_code.co_varnames[0]}", {}).keys()
    )
    for name in sorted(counted):
        where = frames.place(place.code, place.line)
        doubts.add(
            f"`{place.code.co_qualname}` changes `{name}` before it asks run.batches() for the next batch "
            f"({where})",
            "Ask for the batch first and count then, or use `run.batch`.",
        )


def check_recursion(chain: list[FrameType], doubts: Doubts) -> None:
    """A function that makes a step and calls itself for the next one."""
    code = chain[0].f_code
    if any(frame.f_code is code for frame in chain[1:]):
        where = frames.place(code, code.co_firstlineno)
        doubts.add(
            f"`{code.co_qualname}` ({where}) calls itself from step to step, and what it hands on cannot be "
            "put back",
            "Write the steps as a loop.",
        )
