"""What a frame tells about the function that it runs."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator

from lastcall.script.source import scopes

PASSES = 200  # enough for an interpreter that specializes a loop to do so


def test_a_loop_over_a_generator_is_at_the_same_instruction_in_each_of_its_passes() -> None:
    seen: set[tuple[int, int]] = set()

    def numbers() -> Iterator[int]:
        for number in range(3):
            outer = sys._getframe(1)
            seen.add((scopes.instruction(outer), outer.f_code.co_code[scopes.instruction(outer)]))
            yield number

    def loop() -> None:
        for _ in numbers():
            pass

    for _ in range(PASSES):
        loop()
    ((_, opcode),) = seen
    assert opcode == dis.opmap["FOR_ITER"]
