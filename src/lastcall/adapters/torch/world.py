"""Which rank this process is, from what torch.distributed or torchrun say. Nobody configures it.

The ranks meet in torch's own store: that of the process group, or torchrun's where no group has been made yet. Under torchrun both live
in the agent, outside the training processes.
"""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import torch.distributed as dist

from lastcall import errors, settings
from lastcall.adapters.torch.c10d import C10dStore
from lastcall.core.store import Scoped, Store
from lastcall.core.world import World
from lastcall.settings import JITCheckpointConfig

_runs = itertools.count(1)  # the ranks protect their runs in the same order: so each has a name without asking
_TIMEOUT = datetime.timedelta(minutes=5)


def find(jit: JITCheckpointConfig) -> World:
    """The world that protect() was called in."""
    if jit.ranks == "separate" or not dist.is_available():
        return World()
    if dist.is_initialized():
        if dist.get_world_size() == 1:
            return World()
        return _of(dist.get_rank(), dist.get_world_size(), _of_group)
    told = settings.of_torchrun()
    if told is not None and int(told["WORLD_SIZE"]) > 1:
        return _of(int(told["RANK"]), int(told["WORLD_SIZE"]), lambda: _of_agent(told))
    return World()


def _of(rank: int, size: int, open_store: Any) -> World:
    number = next(_runs)

    def meet() -> Store:
        return Scoped(open_store(), f"lastcall/{number}/")

    return World(rank, size, meet, settings.host_of_rank_0(size))


def _of_group() -> Store:
    try:
        return C10dStore(dist.distributed_c10d._get_default_store())
    except (RuntimeError, ValueError) as error:
        raise errors.RanksError(f"the store of the process group cannot be used: {error}") from error


def _of_agent(told: dict[str, str]) -> Store:
    """torchrun's own store: protect() was called before init_process_group."""
    try:
        store = dist.TCPStore(told["MASTER_ADDR"], int(told["MASTER_PORT"]), is_master=False, timeout=_TIMEOUT, wait_for_workers=False)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        raise errors.RanksError(
            f"the ranks cannot meet: torchrun's store at {told['MASTER_ADDR']}:{told['MASTER_PORT']} cannot be reached ({error}). Call "
            "torch.distributed.init_process_group() before protect()."
        ) from error
    attempt = f"lastcall/{told['TORCHELASTIC_RUN_ID']}/{told['TORCHELASTIC_RESTART_COUNT']}/"
    return Scoped(C10dStore(store), attempt)
