"""The environment that makes the Python processes below `lastcall run` find the bootstrap."""

from __future__ import annotations

import os
from collections.abc import Mapping

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
_OFF = ("0", "false", "no", "off")


def additions(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a child: PYTHONPATH with our `site` folder in front of what is there.

    Nothing if lastcall was disabled explicitly, or if the folder is already on the path. Nothing either if
    its name contains a colon, which PYTHONPATH cannot express: then only the .pth file of the installed
    package works.
    """
    if environ.get("LASTCALL_ENABLED", "").strip().lower() in _OFF or os.pathsep in SITE:
        return {}
    given = environ.get("PYTHONPATH", "")
    if SITE in given.split(os.pathsep):
        return {}
    # An empty PYTHONPATH means none, but an empty entry in one is the working directory: never add a trailing
    # colon.
    return {"PYTHONPATH": f"{SITE}{os.pathsep}{given}" if given else SITE}
