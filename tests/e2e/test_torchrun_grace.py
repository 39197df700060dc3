"""torchrun kills after 30 seconds, whatever it was told. With lastcall it waits for as long as the grace
is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import forkserver as nursery
from lastcall import testing
from lastcall.auto import environment
from lastcall.core.checkpoint import catalog
from lastcall.storage import files as storage

SCRIPT = Path(__file__).parent / "scripts" / "auto_slow_save.py"
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
LASTCALL_RUN = [sys.executable, "-m", "lastcall", "run", "--grace", "60", "--"]
SETTINGS = {"LASTCALL_KILL_WAIT_SECONDS": "0", "LASTCALL_GRACE_SECONDS": "60", "SAVE_SECONDS": "36"}


class Job:
    """One torchrun with two workers."""

    def __init__(self, folder: Path, *before: str, slow: str = "0,1", **environ: str) -> None:
        folder.mkdir()
        self.folder = folder
        self._log = (folder / "log").open("wb")
        command = [*before, *TORCHRUN, str(SCRIPT), str(folder)]
        given = nursery.environment(**SETTINGS, SLOW_RANKS=slow, **environ)
        self.process = subprocess.Popen(
            command, env=given, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def workers(self) -> list[int]:
        return [int(text) for path in sorted(self.folder.glob("pid*")) if (text := path.read_text())]

    def until_training(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log()
            return len(self.workers()) == 2

        nursery.until(ready, f"two workers of {self.folder.name}")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def committed(self) -> list[int]:
        """The ranks that have a checkpoint."""
        return [
            rank for rank in (0, 1) if catalog.Catalog(self.folder / f"rank{rank}", storage.Files()).entries()
        ]

    def close(self) -> None:
        for pid in [*self.workers(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)
        self.process.wait()
        self._log.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[dict[str, Job]]:
    """Side by side, since each takes as long as the grace: what is waited for is not the processor."""
    zero_code = {"LASTCALL_ENABLED": "1"}
    zero_code |= environment.additions(nursery.environment())
    with contextlib.ExitStack() as stack:
        started = {
            "lastcall run": Job(tmp_path / "run", *LASTCALL_RUN),
            "plain": Job(tmp_path / "plain"),
            "one first": Job(tmp_path / "first", slow="1", **zero_code),
            "one first, plain": Job(tmp_path / "first-plain", slow="1"),
        }
        for job in started.values():
            stack.callback(job.close)
        for job in started.values():
            job.until_training()
        yield started


@pytest.mark.timeout(180)
def test_workers_get_the_whole_grace_below_lastcall_and_thirty_seconds_without(jobs: dict[str, Job]) -> None:
    # The notice comes to the outermost process ...
    jobs["lastcall run"].process.send_signal(signal.SIGTERM)
    jobs["plain"].process.send_signal(signal.SIGTERM)
    # ... or to the workers themselves, where torchrun stops the others when the first one has saved.
    for name in ("one first", "one first, plain"):
        for pid in jobs[name].workers():
            os.kill(pid, signal.SIGTERM)
    codes = {name: job.process.wait(120) for name, job in jobs.items()}

    assert codes["lastcall run"] == 75, jobs["lastcall run"].log()
    for rank in (0, 1):
        testing.assert_resumable(jobs["lastcall run"].folder / f"rank{rank}")

    assert codes["plain"] == 1
    assert "forcefully exiting via" in jobs["plain"].log()
    assert jobs["plain"].committed() == []

    assert jobs["one first"].committed() == [0, 1], jobs["one first"].log()
    assert "forcefully exiting via" not in jobs["one first"].log()

    assert jobs["one first, plain"].committed() == [0]
    assert "forcefully exiting via" in jobs["one first, plain"].log()
