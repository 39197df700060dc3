"""The guardian: after an incarnation, turns what a killed process left in shared memory into a committed
checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lastcall import errors
from lastcall.core.process import registry
from lastcall.core.startup import recovery
from lastcall.core.startup.recovery import Rescued

log = logging.getLogger("lastcall")


def recover(members: Sequence[registry.Member], how: str) -> list[Rescued]:
    """Save what the dead among these left behind; `how` says what ended them. Never raises: the launcher
    continues in any case."""
    rescued = []
    for root in sorted({member.root for member in members if not registry.alive(member)}):
        try:
            found = recovery.recover(Path(root), how)
        except (errors.LastcallError, OSError) as error:
            log.warning("The guardian could not save %s: %s", root, error)
            continue
        if found is not None:
            rescued.append(found)
    return rescued
