"""`lastcall run` as a real process under test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.processes import live_processes as running
from helpers.processes.forkserver import environment, until

SCRIPTS = Path(__file__).resolve().parent
# trains as far as the launcher can tell, and needs no torch
MEMBER = [sys.executable, str(SCRIPTS / "launch_member.py")]
PLATFORMS = ("RUNAI_", "KUBERNETES_", "SLURM_", "_CONDOR_")


class Launched:
    """One launcher with all that is below it; leaving the block ends every one of them."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[object],
        *options: object,
        before: Sequence[str] = (),
        **env: str,
    ) -> None:
        number = len(list(folder.glob("stdout-*")))
        self._stdout, self._stderr = folder / f"stdout-{number}", folder / f"stderr-{number}"
        clean = {name: value for name, value in environment().items() if not name.startswith(PLATFORMS)}
        words = [
            *before,
            sys.executable,
            "-m",
            "lastcall",
            "run",
            "--cloud",
            "none",
            *map(str, options),
            "--",
            *map(str, command),
        ]
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                cwd=folder,
                env={**clean, "LASTCALL_KILL_WAIT_SECONDS": "0", **env},
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in in_session(self.process.pid):  # processes may have left the group, but not the session
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, signum: int = signal.SIGTERM) -> None:
        os.kill(self.process.pid, signum)

    def wait(self) -> int:
        until(lambda: self.process.poll() is not None, f"the end of the launcher\n{self.log()}")
        return self.process.returncode

    def lines(self) -> list[str]:
        text = self._stdout.read_text(errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    def log(self) -> str:
        return self._stderr.read_text(errors="replace")

    def expect(self, start: str, count: int = 1) -> str:
        """Wait for the so-many-th line on stdout that starts like this; what follows on it."""

        def found() -> list[str]:
            return [line for line in self.lines() if line.startswith(start)]

        def seen() -> bool:
            ended = self.process.poll() is not None
            if len(found()) < count and ended:
                raise AssertionError(
                    f"ended with {self.process.returncode} and no line {start!r}: "
                    f"{self.lines()[-5:]}\n{self.log()}"
                )
            return len(found()) >= count

        until(seen, f"a line {start!r}")
        return found()[count - 1][len(start) :].strip()

    def expect_log(self, part: str) -> None:
        def seen() -> bool:
            ended = self.process.poll() is not None
            if part not in self.log() and ended:
                raise AssertionError(
                    f"ended with {self.process.returncode} and never logged {part!r}:\n{self.log()}"
                )
            return part in self.log()

        until(seen, f"a log line with {part!r}")


def in_session(leader: int) -> list[int]:
    """The processes of a session that live."""
    return [pid for pid, fields in running.stats() if int(fields[3]) == leader and fields[0] != "Z"]


def children(pid: int) -> dict[int, str]:
    """The children of a process, zombies included, with their state letters."""
    return {child: fields[0] for child, fields in running.stats() if int(fields[1]) == pid}


def script(folder: Path, name: str, text: str) -> Path:
    """An executable file."""
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path
