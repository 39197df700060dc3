"""Real Python interpreters with and without lastcall around them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.processes import forkserver as nursery
from lastcall.auto import environment

BASE = getattr(sys, "_base_executable", sys.executable)


def outside(**more: str) -> dict[str, str]:
    """The environment of a shell that has never heard of lastcall."""
    given = {name: value for name, value in nursery.environment().items() if not name.startswith("PYTHON")}
    return {**given, "PYTHONDONTWRITEBYTECODE": "1", **more}


def below(**more: str) -> dict[str, str]:
    """The environment that `lastcall run` gives to what it starts."""
    given = outside(**more)
    return {
        **given,
        "LASTCALL_ENABLED": "1",
        **environment.additions(given),
        **{k: v for k, v in more.items() if k != "PYTHONPATH"},
    }


def run(
    executable: str | Path, *arguments: object, env: dict[str, str], **more: Any
) -> subprocess.CompletedProcess[str]:
    command = [os.fspath(executable), *map(str, arguments)]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=nursery.PATIENCE, check=False, **more
    )


def venv(folder: Path) -> Path:
    """An environment with nothing in it; its interpreter."""
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=nursery.PATIENCE)
    return folder / "bin" / "python"


def packages(executable: Path) -> Path:
    """The site-packages of an environment."""
    (found,) = (executable.parent.parent / "lib").glob("python*/site-packages")
    return found
