"""Lets the ranks that torchrun starts again find each other.

torchrun keeps one store for all attempts (seen with torch 2.13), and its workers write their addresses under the same keys in each of
them. A rank that is a moment faster than its peer reads the address that the peer's killed predecessor left, and fails, or waits for
ever: one restart in four, with two gloo ranks. "We create a new TCPStore for every retry", says the comment there; that ended when the
store began to be shared. Here each attempt after the first gets keys of its own.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

_MARK = "_lastcall_original"


def apply(module: ModuleType) -> None:
    """For torch.distributed.rendezvous. A torch without this function is left alone: it makes its stores some other way."""
    create: Any = getattr(module, "_create_c10d_store", None)
    shared: Any = getattr(module, "_torchelastic_use_agent_store", None)
    if create is None or shared is None or hasattr(create, _MARK):
        return

    @functools.wraps(create)
    def of_this_attempt(*args: Any, **kwargs: Any) -> Any:
        store = create(*args, **kwargs)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if not shared() or attempt == "0":
            return store
        prefix: Any = sys.modules["torch.distributed"].PrefixStore  # not there yet when rendezvous is imported
        return prefix(f"attempt_{attempt}", store)

    setattr(of_this_attempt, _MARK, create)
    module._create_c10d_store = of_this_attempt  # type: ignore[attr-defined]
