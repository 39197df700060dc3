"""Which versions of Ray lastcall was tested with, and what the older ones lack."""

from __future__ import annotations

import logging
import re

log = logging.getLogger("lastcall")
OLDEST, NEWEST = (2, 51), (2, 60)
PREEMPTION = (2, 58)  # the first one whose controller restarts a preempted run without charging max_failures

_logged: set[str] = set()


def parse(text: str) -> tuple[int, int]:
    """(2, 60) for "2.60.0"; (0, 0) for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def remark(text: str) -> str | None:
    """What a user should know about this version; None if nothing."""
    version = parse(text)
    if version < OLDEST:
        return (
            f"Ray {text} is older than {_name(OLDEST)}, where Ray Train V2 became the default: this run is "
            "not protected"
        )
    if version < PREEMPTION:
        return (
            f"Ray {text} knows no preemption: only SIGTERM to a train worker is a notice, training continues "
            "after the save, and the restart counts against FailureConfig(max_failures). Ray "
            f"{_name(PREEMPTION)} or newer lifts these limits"
        )
    if version > NEWEST:
        return (
            f"Ray {text} is newer than {_name(NEWEST)}, the newest version that lastcall was tested with. "
            "Please report problems"
        )
    return None


def supported(text: str) -> bool:
    """Whether a run of this version can be protected. The remark is logged once."""
    words = remark(text)
    if words is not None and words not in _logged:
        _logged.add(words)
        log.warning("%s", words)
    return parse(text) >= OLDEST


def _name(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
