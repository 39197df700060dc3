"""Ray's own word for a notice: PreemptionInfo. What a worker holds of it, the controller sees at its next
poll; it then waits for the deadline, and restarts the run on its preemption budget instead of max_failures.

Ray writes it when a node is drained: `told` then hears of it at once, without polling. We write it when a
signal came, and again when the checkpoint is committed, with a deadline that is now: nothing is left to wait
for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

try:
    from ray.train.v2._internal.execution.preemption import PreemptionContext, PreemptionInfo
except ImportError:  # before Ray 2.57
    PreemptionContext, PreemptionInfo = object, None


class Watched(PreemptionContext):  # type: ignore[misc]
    """In the place of the worker's own context. Only what Ray writes is passed on."""

    told: Callable[[Any], None] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "preemption_info" and value is not None and self.told is not None:
            self.told(value)


class Echo:
    """`degraded`: this Ray has no such thing."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._watched: Watched | None = None
        self._former: Any = None

    @property
    def degraded(self) -> bool:
        return PreemptionInfo is None or not hasattr(self._context, "preemption_context")

    def begin(self, told: Callable[[float | None, dict[str, list[int]]], None]) -> None:
        """`told(deadline, nodes)` on Ray's own thread: seconds from now, and the ranks on each node that
        goes."""
        if self.degraded:
            return
        self._former = self._context.preemption_context
        self._watched = Watched()
        self._watched.preemption_info = self._former.preemption_info
        self._watched.told = lambda info: told(_left(info), dict(info.preempted_node_to_ranks))
        self._context.preemption_context = self._watched
        if self._former.preemption_info is not None:
            self._watched.told(self._former.preemption_info)

    def end(self) -> None:
        if self._watched is not None:
            self._watched.told = None

    def say(self, left: float, nodes: Mapping[str, Sequence[int]]) -> None:
        """Have the controller know. A deadline can only come closer: the controller keeps the earliest that
        it has seen."""
        if self._watched is None:
            return
        held = self._watched.preemption_info
        known = {
            **(held.preempted_node_to_ranks if held is not None else {}),
            **{node: list(ranks) for node, ranks in nodes.items()},
        }
        info = PreemptionInfo(deadline_ms=int((time.time() + left) * 1000), preempted_node_to_ranks=known)
        object.__setattr__(self._watched, "preemption_info", info)


def _left(info: Any) -> float | None:
    return None if info.deadline_ms is None else info.deadline_ms / 1000 - time.time()
