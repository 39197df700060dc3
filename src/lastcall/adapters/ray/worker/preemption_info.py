"""Ray's own form of a notice: PreemptionInfo. The controller reads that of each worker at its next poll; it
then waits for the deadline, and restarts the run on its preemption budget instead of max_failures.

Ray writes it when it drains a node: `on_drain` learns that at once, without polling. We write it when a
signal came, and again when the checkpoint is committed, with a deadline of now: there is nothing left to wait
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


class ObservedPreemptionContext(PreemptionContext):  # type: ignore[misc]
    """Replaces the worker's own context. Reports what Ray writes, and not what we write."""

    on_write: Callable[[Any], None] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "preemption_info" and value is not None and self.on_write is not None:
            self.on_write(value)


class PreemptionInfoWriter:
    """`degraded`: this Ray knows no preemption."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._observed: ObservedPreemptionContext | None = None
        self._former: Any = None

    @property
    def degraded(self) -> bool:
        return PreemptionInfo is None or not hasattr(self._context, "preemption_context")

    def begin(self, on_drain: Callable[[float | None, dict[str, list[int]]], None]) -> None:
        """`on_drain(left, nodes)` is called on Ray's own thread: seconds until the deadline, and the ranks on
        each node that is drained."""
        if self.degraded:
            return
        self._former = self._context.preemption_context
        self._observed = ObservedPreemptionContext()
        self._observed.preemption_info = self._former.preemption_info
        self._observed.on_write = lambda info: on_drain(_left(info), dict(info.preempted_node_to_ranks))
        self._context.preemption_context = self._observed
        if self._former.preemption_info is not None:
            self._observed.on_write(self._former.preemption_info)

    def end(self) -> None:
        if self._observed is not None:
            self._observed.on_write = None

    def write(self, left: float, nodes: Mapping[str, Sequence[int]]) -> None:
        """Inform the controller. A deadline can only come closer: the controller keeps the earliest one that
        it has read."""
        if self._observed is None:
            return
        held = self._observed.preemption_info
        known = {
            **(held.preempted_node_to_ranks if held is not None else {}),
            **{node: list(ranks) for node, ranks in nodes.items()},
        }
        info = PreemptionInfo(deadline_ms=int((time.time() + left) * 1000), preempted_node_to_ranks=known)
        object.__setattr__(self._observed, "preemption_info", info)


def _left(info: Any) -> float | None:
    return None if info.deadline_ms is None else info.deadline_ms / 1000 - time.time()
