"""The barrier of Ray Train: every worker calls an actor, which answers when all have called. Measured only
where ray is installed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable

import torch.distributed as dist


class _Meeting:
    """An actor."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._here = 0
        self._all_here = asyncio.Event()

    async def come(self) -> None:
        mine = self._all_here
        self._here += 1
        if self._here == self._size:
            self._here, self._all_here = 0, asyncio.Event()
            mine.set()
        await mine.wait()


def barrier(stack: contextlib.ExitStack) -> tuple[Callable[[], object] | None, str]:
    """The barrier, or None and why there is none. Every rank must ask."""
    if importlib.util.find_spec("ray") is None:
        return None, "ray is not installed"
    import ray

    space = "lastcall-bench"
    address = [""]
    known = None
    if dist.get_rank() == 0:
        context = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, namespace=space)
        address = [context.address_info["address"]]
        known = (
            ray.remote(_Meeting)
            .options(name="meeting", num_cpus=0, max_concurrency=1000)
            .remote(dist.get_world_size())
        )
        ray.get(known.__ray_ready__.remote())
    dist.broadcast_object_list(address)
    if dist.get_rank() > 0:
        ray.init(address=address[0], log_to_driver=False, namespace=space)
    stack.callback(ray.shutdown)
    stack.callback(dist.barrier)  # rank 0 takes the cluster with it
    if known is None:  # rank 0 keeps the handle of its own: the actor would end with it
        known = ray.get_actor("meeting", namespace=space)
    return lambda: ray.get(known.come.remote()), ""
