"""The engines that writers and readers share: people make a new Writer for every checkpoint, and its threads
and buffers cost 50 ms."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import torch

from lastcall.adapters.torch.tensors import pinned
from lastcall.core.engine import writer

_lock = threading.Lock()
_made: dict[tuple[int, int, object], writer.Engine] = {}


def engine(threads: int, tensors: Iterable[torch.Tensor]) -> writer.Engine:
    """An engine with so many threads, and with buffers that suit these tensors. It does one piece of work at
    a time."""
    allocate = pinned.allocator(tensors)
    key = (os.getpid(), threads, allocate)  # the threads of an engine do not come along into a fork
    with _lock:
        found = _made.get(key)
        if found is None:
            found = _made[key] = writer.Engine(threads, allocate=allocate)
    return found
