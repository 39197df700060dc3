"""The death of a DataLoader worker, kept out of the optimizer step.

torch raises it from its handler of SIGCHLD, wherever the main thread happens to be. Inside `optimizer.step()`
that would tear the weights, and the last completed step with them. So the handler finds nothing there; the
loader itself finds the dead worker when it is next asked for a batch, five seconds later at most, and raises
where the state is whole.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data._utils import signal_handling

from lastcall.core.sync.gate import Gate

_NAME = "_error_if_any_worker_fails"


class Casualties:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._former: Callable[[], None] | None = None

    def install(self) -> None:
        former: Callable[[], None] | None = getattr(signal_handling, _NAME, None)
        if former is None:  # a torch that does it another way
            return
        gate = self._gate

        def outside_the_step() -> None:
            if gate.depth == 0:
                former()

        self._former, self._ours = former, outside_the_step
        setattr(signal_handling, _NAME, outside_the_step)

    def remove(self) -> None:
        if self._former is not None and getattr(signal_handling, _NAME, None) is self._ours:
            setattr(signal_handling, _NAME, self._former)
