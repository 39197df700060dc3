"""Who wants to know that a train() call is protected from now on: adapters above this one. Imports nothing,
so that they may sign up before the script has imported torch, and has said what that depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# told of the TrainerRun, on the training thread, before the first step
begun: list[Callable[[Any], None]] = []
