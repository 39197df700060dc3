"""Where the ranks of a run meet: a store of our own in the controller, which outlives every train worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lastcall import clock as clocks
from lastcall import errors, messages
from lastcall.core.ranks.agreement import Agreement
from lastcall.core.store import Scoped, Store
from lastcall.core.store.client import StoreClient

log = logging.getLogger("lastcall")
_CONNECT_SECONDS = 10.0
SAVED = "saved"  # tells the controller that a save answered the notice


class RankConnection:
    """One thread's connection to the store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.agreement = Agreement(store, rank, size, clocks.Clock())
        self._store = store

    def clone(self) -> RankConnection:
        return RankConnection(self._store.clone(), self.rank, self.size)

    def close(self) -> None:
        self._store.close()

    def dead(self) -> set[int]:
        """Ranks that the controller knows to be dead."""
        try:
            found = self._store.get_many([_death(rank) for rank in range(self.size)])
        except errors.StoreLost:
            return set()
        return {rank for rank, data in enumerate(found) if data is not None}

    def mark_dead(self, rank: int) -> None:
        self._store.set(_death(rank), messages.packed({"dead": True}))


def connect(address: Mapping[str, Any], rank: int, size: int) -> RankConnection:
    """StoreLost if the controller's store cannot be reached. `address`: host, port, secret and
    incarnation."""
    store = StoreClient(address["host"], address["port"], address["secret"], _CONNECT_SECONDS)
    return RankConnection(Scoped(store, f"{address['incarnation']}/"), rank, size)


def _death(rank: int) -> str:
    return f"dead/{rank}"
