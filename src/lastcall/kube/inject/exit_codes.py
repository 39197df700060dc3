"""Whether the exit code of a run that has saved reaches Kubernetes: `bash -c "python train.py | tee log"`
ends with that of tee, and the Job is Complete. Only the object itself is read: a script in the image is not
visible here."""

from __future__ import annotations

from typing import Any

from lastcall.kube.inject.draft import Path, items
from lastcall.launch.shell import commandline

_LONGEST = 120  # of the reason: the API server cuts warnings at 256 characters


def lost(obj: Any, container: Path) -> str | None:
    """The warning for a container whose exit code gets lost."""
    words = [*items(obj, (*container, "command")), *items(obj, (*container, "args"))]
    if not all(isinstance(word, str) for word in words):
        return None
    for script in commandline.understand(tuple(words), {}, files=False).shells:
        swallowed = script.swallows()
        if swallowed is not None:
            why = swallowed.why if len(swallowed.why) <= _LONGEST else f"{swallowed.why[: _LONGEST - 3]}..."
            remedy = (
                "start it with: set -o pipefail;" if swallowed.in_pipe else "end it with: exec python ..."
            )
            return (
                f"{script.name}: {why}. A run that saved and exited then looks finished and is not "
                f"restarted: {remedy}"
            )
    return None
