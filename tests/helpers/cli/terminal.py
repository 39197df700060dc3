"""A real terminal around a command: what it writes there, and keys that are typed."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path

PATIENCE = 60.0  # seconds


class Terminal:
    """A process on a terminal of its own."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], folder: Path | str = ".", columns: int = 80
    ) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
            os.chdir(folder)
            os.execvpe(argv[0], list(argv), dict(environ))
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def read(self, seconds: float) -> bool:
        """More of what it writes. False at its end, or if there is nothing for so long."""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return False
        try:
            more = os.read(self._fd, 65536)
        except OSError:  # the last process has closed it
            return False
        self.text += more.decode(errors="replace")
        return bool(more)

    def until(self, wanted: str) -> None:
        end = time.monotonic() + PATIENCE
        while wanted not in self.text:
            if time.monotonic() > end:
                raise AssertionError(f"{wanted!r} did not come: {self.text!r}")
            self.read(0.2)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


@contextlib.contextmanager
def opened(
    argv: Sequence[str], environ: Mapping[str, str], folder: Path | str = ".", columns: int = 80
) -> Iterator[Terminal]:
    terminal = Terminal(argv, environ, folder, columns)
    try:
        yield terminal
    finally:
        terminal.close()


def shown(argv: Sequence[str], environ: Mapping[str, str], columns: int = 80) -> str:
    """All that a command writes on a terminal."""
    with opened(argv, environ, columns=columns) as terminal:
        while terminal.read(PATIENCE):
            pass
        return terminal.text.replace("\r\n", "\n")
