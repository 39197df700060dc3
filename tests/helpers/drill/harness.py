"""Starts the drill as a user would, and sees to it that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.processes.forkserver import PATIENCE, environment

TRAINER = Path(__file__).with_name("trainer.py")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "lastcall", "drill", *map(str, words)]


def trainer(directory: Path, *more: object) -> list[object]:
    return ["--", sys.executable, TRAINER, directory, *more]


def drill(folder: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """The whole drill, in a folder of its own for temporary files."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command(*words),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=folder,
        env=_environment(folder, env),
    )
    assert not leftovers(folder), f"left behind: {leftovers(folder)}\n{done.stderr}"
    return done


def begin(folder: Path, *words: object, **env: str) -> subprocess.Popen[str]:
    """The drill in the background."""
    return subprocess.Popen(
        command(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=_environment(folder, env),
    )


def reported(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def leftovers(folder: Path) -> list[int]:
    """Living processes that were started for this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"TMPDIR={folder}".encode() in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def end(process: subprocess.Popen[str], folder: Path) -> None:
    """Whatever a test has left."""
    process.kill()
    process.communicate()
    for pid in leftovers(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _environment(folder: Path, env: dict[str, str]) -> dict[str, str]:
    return environment(TMPDIR=str(folder), LASTCALL_KILL_WAIT_SECONDS="0", **env)
