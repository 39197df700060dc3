"""The store through which the ranks agree, for as long as `lastcall run` lives: it outlasts every training
process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

log = logging.getLogger("lastcall")
VARIABLE = "LASTCALL_STORE"


class Served:
    """How the processes below reach the store, and how to clear it."""

    def __init__(self, told: str | None = None, clear: Callable[[], None] = lambda: None) -> None:
        self.told = told
        """PORT:SECRET, or None without a store. The host is not in it: rank 0, which runs on this one, knows
        the name that others reach it by."""
        self.clear = clear
        """Before the next incarnation: no rank may read what a rank of the former one has written."""


@contextlib.contextmanager
def served(*, everywhere: bool = True) -> Iterator[Served]:
    """Called once the signals are blocked (signal_inbox.py), so they cannot kill the server thread. A run
    without a store is a run all the same, so nothing here is fatal. `everywhere`: whether ranks on other
    machines may come; otherwise only this one is listened to."""
    from lastcall.core.store import server

    secret = os.urandom(16).hex()
    store = server.StoreServer("" if everywhere else "127.0.0.1", secret=secret)
    try:
        store.start()
    except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
        log.warning(
            "Could not start a store for the ranks of this run: %s. They will agree through torch's store, "
            "which "
            "rank 0 or torchrun hosts",
            error,
        )
        yield Served()
        return
    log.debug("The store for the ranks listens on port %d", store.address[1])
    try:
        yield Served(f"{store.address[1]}:{secret}", store.clear)
    finally:
        store.stop()


@contextlib.contextmanager
def unserved() -> Iterator[Served]:
    """lastcall is switched off."""
    yield Served()
