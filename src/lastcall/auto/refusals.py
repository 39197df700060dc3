"""Tells `lastcall run` that a program could not start: a missing module, a syntax error. A retry does not
help then, and torchrun, if it is in between, always returns 1.

Standard library only; imported when it is needed (bootstrap).
"""

import json
import os


def tell(why: str) -> None:
    """Runs at the end of a program that has not trained."""
    folder = os.environ.get("LASTCALL_REGISTRY", "")
    try:
        if _has_trained(os.path.join(folder, f"member-{os.getpid()}.json")):
            return
        with open(os.path.join(folder, f"refused-{os.getpid()}.json"), "w") as file:
            json.dump({"because": why}, file)
    except OSError:
        return


def _has_trained(path: str) -> bool:
    try:
        with open(path) as file:
            member = json.load(file)
        return bool(member["step"] > (member["resumed"] or 0))
    except (OSError, ValueError, KeyError, TypeError):
        return False
