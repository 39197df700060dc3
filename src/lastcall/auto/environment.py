"""The environment that makes the Python processes below `lastcall run` find the bootstrap."""

from __future__ import annotations

import os
from collections.abc import Mapping

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
_OFF = ("0", "false", "no", "off")


def additions(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a child: PYTHONPATH with our `site` folder in front of what is there.

    Nothing if lastcall was switched off by hand, or if the folder is on the path already. Nothing either if its name holds a
    colon, which PYTHONPATH cannot express: then the .pth file of the installed package is the only way in.
    """
    if environ.get("LASTCALL_ENABLED", "").strip().lower() in _OFF or os.pathsep in SITE:
        return {}
    given = environ.get("PYTHONPATH", "")
    if SITE in given.split(os.pathsep):
        return {}
    # An empty PYTHONPATH is none, but an empty entry in one is the working directory: no colon without something behind it.
    return {"PYTHONPATH": f"{SITE}{os.pathsep}{given}" if given else SITE}
