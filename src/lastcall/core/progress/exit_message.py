"""How the run in a container ended, as one line of JSON in the container's termination message.

Kubernetes keeps that message in the pod's status, which outlives the log and the files of the container:
`lastcall kube pause` reads it there, and OpenShift AI's controller believes it more than its last poll of the
page. Nothing is created outside of a pod, and what another program has written stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Mapping

from lastcall import settings

_LONGEST = 4096  # bytes; Kubernetes cuts off the rest
_OURS = ("state", "incarnation", "checkpoint", "progressPercentage")  # names in each of our messages


def write(document: Mapping[str, object]) -> None:
    """The report at the end of a run. Never raises: the run is about to exit."""
    message = json.dumps(document, allow_nan=False).encode()
    if len(message) > _LONGEST:
        short = {**document, "trainMetrics": {}, "evalMetrics": {}}
        message = json.dumps(short, allow_nan=False).encode()
    if len(message) <= _LONGEST:  # half a document would be none
        _replace(message)


def clear() -> None:
    """A new incarnation in the same container: the message of the last one is out of date."""
    _replace(b"")


def _replace(message: bytes) -> None:
    path = settings.termination_log()
    if path is None:
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "r+b", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return
            # Another process of this container may write its own end: without the lock the shorter message
            # would keep the tail of the longer one.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_ours(file.read(_LONGEST)):
                file.seek(0)
                file.truncate()
                file.write(message)


def _is_ours(text: bytes) -> bool:
    if not text:
        return True
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and all(name in found for name in _OURS)
