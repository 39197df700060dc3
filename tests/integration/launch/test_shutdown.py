"""The end of an incarnation under `lastcall run`, with real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lastcall.core.process import registry
from lastcall.core.process.registry import Member
from lastcall.launch.options import LaunchOptions
from lastcall.launch.shutdown import Shutdown
from lastcall.types import Notice


def join(folder: Path, pid: int, outcome: str | None) -> None:
    member = Member(pid, registry.process_start(pid) or 0, "/run", step=7, outcome=outcome)
    (folder / f"member-{pid}.json").write_text(json.dumps(dataclasses.asdict(member)))


def test_h6_a_frozen_rank_is_not_waited_for_once_the_others_have_saved(tmp_path: Path) -> None:
    """H6: it saves nothing, and torchrun would wait for it long after the grace."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        join(tmp_path, child.pid, None)
        shutdown = Shutdown(LaunchOptions(("x",)), registry.Registry(tmp_path))
        now = time.monotonic()
        shutdown.notice = Notice("signal", "SIGTERM", now, now + 600.0, signal.SIGTERM)
        shutdown.tick()
        assert child.poll() is None  # nobody has saved yet: it may go on, and save
        join(tmp_path, os.getpid(), "saved")
        shutdown.tick()
        assert child.wait(60) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
