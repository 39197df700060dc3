"""Scripts run as real processes, so that tests can send them real signals. Each runs in a session of its
own."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 90.0  # seconds until a test gives up; nothing is expected to take anywhere near it
SOURCES = Path(__file__).resolve().parents[3] / "src"


class Script:
    """A Python program under test. Leaving the block kills what is left of it and of its children."""

    def __init__(self, folder: Path, source: str, *, blocked: tuple[int, ...] = ()) -> None:
        path = folder / "script.py"
        path.write_text(textwrap.dedent(source))
        self._errors = tempfile.TemporaryFile()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", str(path)],
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                text=True,
                env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self.process.pid
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def expect(self, start: str) -> str:
        """Wait for a line that starts like this; what follows on it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no line {start!r} in time; got {self.lines}; {self.errors()}"
                ) from None
            if line is None:
                raise AssertionError(f"ended without a line {start!r}; got {self.lines}; {self.errors()}")
            self.lines.append(line)
            if line.startswith(start):
                return line[len(start) :].strip()

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def send_group(self, signum: int) -> None:
        os.killpg(self.pid, signum)

    def wait(self) -> int:
        """The return code, as subprocess gives it: negative for a signal."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running; got {self.lines}; {self.errors()}") from None
        return code

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


def eventually(condition: Callable[[], bool]) -> bool:
    """Poll until it holds; False after a long time."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def state(pid: int) -> str:
    """The process's state letter as in ps; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone(pid: int) -> bool:
    """No such process, or nothing but a zombie that its parent (in a container often nobody) has not
    collected."""
    return state(pid) in ("", "Z")
