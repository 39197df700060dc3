"""Which versions of Ray this was tried with, and what is missing in the older ones."""

from __future__ import annotations

import logging
import re

log = logging.getLogger("lastcall")
OLDEST, NEWEST = (2, 51), (2, 60)
PREEMPTION = (2, 58)  # the first one whose controller restarts a preempted run without charging max_failures

_said: set[str] = set()


def parse(text: str) -> tuple[int, int]:
    """(2, 60) of "2.60.0"; (0, 0) of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def remark(text: str) -> str | None:
    """What a user should know of this version; None if nothing."""
    version = parse(text)
    if version < OLDEST:
        return (
            f"Ray {text} is older than {_name(OLDEST)}, where Ray Train V2 became the default: this run is "
            "not protected"
        )
    if version < PREEMPTION:
        return (
            f"Ray {text} knows no preemption: only SIGTERM to a train worker is a notice, training goes on "
            "after the save, and the "
            f"restart is charged to FailureConfig(max_failures). With Ray {_name(PREEMPTION)} or newer none "
            "of that is so"
        )
    if version > NEWEST:
        return (
            f"Ray {text} is newer than {_name(NEWEST)}, the newest that lastcall was tried with. If "
            "something is odd, tell us"
        )
    return None


def say(text: str) -> bool:
    """Whether this version can be protected at all. The remark is logged once."""
    words = remark(text)
    if words is not None and words not in _said:
        _said.add(words)
        log.warning("%s", words)
    return parse(text) >= OLDEST


def _name(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
