"""Which rank this process is, from what torch.distributed or torchrun say. It needs no configuration.

The ranks meet in torch's own store: that of the process group, or torchrun's where no group has been made
yet. Under torchrun both live in the agent, outside the training processes.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
from typing import Any

import torch.distributed as dist

from lastcall import errors, settings
from lastcall.adapters.torch.distributed.c10d import C10dStore
from lastcall.core.ranks.world import World
from lastcall.core.store import Scoped, Store
from lastcall.settings import JITCheckpointConfig

log = logging.getLogger("lastcall")
# the ranks protect their runs in the same order: so each has a name without asking
_runs = itertools.count(1)
_TIMEOUT = datetime.timedelta(minutes=5)


def find(jit: JITCheckpointConfig) -> World:
    """The world that protect() was called in."""
    if not dist.is_available():
        return World()
    if jit.ranks == "separate":
        _check_apart(jit)
        return World()
    if dist.is_initialized():
        if dist.get_world_size() == 1:
            return World()
        return _of(dist.get_rank(), dist.get_world_size(), _of_group)
    told = settings.of_torchrun()
    if told is not None and int(told["WORLD_SIZE"]) > 1:
        return _of(int(told["RANK"]), int(told["WORLD_SIZE"]), lambda: _of_agent(told))
    return World()


def _check_apart(jit: JITCheckpointConfig) -> None:
    """Ranks that are runs of their own, with one place for the copies of all, would continue from each
    other's checkpoints."""
    told = settings.of_torchrun()
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank, size = (int(told["RANK"]), int(told["WORLD_SIZE"])) if told else (0, 1)
    if size == 1 or jit.mirror is None:
        return
    if jit.origins()["mirror"] != "argument":
        settings.fail(
            f"LASTCALL_MIRROR={jit.mirror} is one mirror for {size} ranks, and with ranks='separate' each is "
            "a separate run. Give "
            f"each its own mirror: JITCheckpointConfig(ranks='separate', mirror=f'{jit.mirror}/{{rank}}')"
        )
    with contextlib.closing(_of_agent(told) if told and not dist.is_initialized() else _of_group()) as store:
        first = store.claim(
            f"lastcall/{settings.attempt().name}/mirror/{jit.mirror}", str(rank).encode()
        ).decode()
    if first != str(rank):
        settings.fail(
            f"mirror={jit.mirror!r} is one mirror for ranks {first} and {rank}, and with ranks='separate' "
            "each is a separate run. "
            f"Give each its own mirror: mirror=f'{jit.mirror}/{{rank}}'"
        )


def _of(rank: int, size: int, open_store: Any) -> World:
    number, attempt = next(_runs), settings.attempt()
    if not attempt.agreed and attempt.name != "0":
        log.warning(
            "torchrun restarted this machine's ranks (attempt %s), but machines count restarts "
            "independently, so ranks may not find "
            "each other. Start it with `lastcall run`, or: export LASTCALL_ENABLED=1",
            attempt.name,
        )

    def meet() -> Store:
        # torchrun has one store for all attempts
        return Scoped(open_store(), f"lastcall/{attempt.name}/{number}/")

    return World(rank, size, meet, settings.host_of_rank_0(size))


def _of_group() -> Store:
    try:
        return C10dStore(dist.distributed_c10d._get_default_store())
    except (RuntimeError, ValueError) as error:
        raise errors.RanksError(f"could not use the store of the process group: {error}") from error


def _of_agent(told: dict[str, str]) -> Store:
    """torchrun's own store: protect() was called before init_process_group."""
    try:
        host, port = told["MASTER_ADDR"], int(told["MASTER_PORT"])
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise errors.RanksError(
            "the ranks cannot meet: could not reach torchrun's store at "
            f"{told['MASTER_ADDR']}:{told['MASTER_PORT']} ({error}). Call "
            "torch.distributed.init_process_group() before protect()."
        ) from error
    return Scoped(C10dStore(store), f"lastcall/{told['TORCHELASTIC_RUN_ID']}/")
