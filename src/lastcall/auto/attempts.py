"""Lets the ranks that torchrun restarts find each other.

torchrun keeps one store for all attempts (seen with torch 2.13), and its workers write their addresses under
the same keys in each of them. A rank that is a moment faster than its peer reads the address that the peer's
killed predecessor left, and fails, or waits for ever: one restart in four, with two gloo ranks. "We create a
new TCPStore for every retry", says the comment there; that ended when the store began to be shared. Here each
attempt after the first gets keys of its own.

Discarded: TORCHELASTIC_RESTART_COUNT as the name of an attempt, where torchruns of several machines have one
rendezvous. Each of them counts the failures of its own workers, and restarts them without counting when
another machine's have failed: the ranks of one attempt would look for each other under different names
forever. All of them know the round of their rendezvous.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from lastcall.core.process import patching

# set by torchrun's own process for its workers; `settings.attempt` reads it as well
ROUND = "LASTCALL_ATTEMPT"


def apply(module: ModuleType) -> None:
    """For torch.distributed.rendezvous. A torch without this function is left alone: it makes its stores some
    other way."""
    shared: Any = getattr(module, "_torchelastic_use_agent_store", None)
    if shared is None or not hasattr(module, "_create_c10d_store"):
        return

    def of_this_attempt(create: Any) -> Any:
        def created(*args: Any, **kwargs: Any) -> Any:
            store = create(*args, **kwargs)
            attempt = os.environ.get(ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            if not shared() or attempt == "0":
                return store
            # not there yet when rendezvous is imported
            prefix: Any = sys.modules["torch.distributed"].PrefixStore
            return prefix(f"attempt_{attempt}", store)

        return created

    patching.wrap(module, "_create_c10d_store", of_this_attempt)


def tell(module: ModuleType) -> None:
    """For torch.distributed.elastic.rendezvous.dynamic_rendezvous, in torchrun's own process: its workers
    inherit what is set here."""
    handler: Any = getattr(module, "DynamicRendezvousHandler", None)
    if hasattr(handler, "next_rendezvous"):
        patching.wrap(handler, "next_rendezvous", _telling)


def _telling(join: Any) -> Any:
    def next_rendezvous(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = join(self, *args, **kwargs)
        number = getattr(getattr(getattr(self, "_state_holder", None), "state", None), "round", None)
        if isinstance(number, int):
            os.environ[ROUND] = str(number)
        else:  # another torch; a torchrun above this one may have set it
            os.environ.pop(ROUND, None)
        return found

    return next_rendezvous
