"""`lastcall run` around programs that cannot start, and around the rest of a script whose training has
finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.scripts.launch_harness import Launched
from lastcall import testing

MISSING = "import no_such_module_anywhere\n"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")


@pytest.mark.parametrize("source", [MISSING, "def broken(:\n"])
def test_f16_an_import_error_before_the_first_step_is_78_and_not_tried_again(
    tmp_path: Path, source: str
) -> None:
    (tmp_path / "train.py").write_text(source)
    with Launched(
        tmp_path, [sys.executable, tmp_path / "train.py"], "--restart", "on-failure", "--backoff", 0
    ) as launched:
        assert launched.wait() == 78, launched.log()
    assert "Starting again" not in launched.log() and launched.log().count("Traceback") <= 1
    assert "training cannot start, and a retry would not help: " in launched.log()


def test_f16_an_import_error_below_torchrun_is_78(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISSING)
    with Launched(
        tmp_path, [*TORCHRUN, tmp_path / "train.py"], "--restart", "on-failure", "--backoff", 0
    ) as launched:
        assert launched.wait() == 78, launched.log()
    assert "Starting again" not in launched.log()


def test_f16_another_error_before_the_first_step_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('/no/such/file')\n")
    options = ("--restart", "on-failure", "--backoff", 0, "--max-restarts", 1)
    with Launched(tmp_path, [sys.executable, tmp_path / "train.py"], *options) as launched:
        assert launched.wait() == 1, launched.log()
    assert launched.log().count("Starting again") == 1


AFTERWARDS = """
import sys, time, torch, lastcall
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with lastcall.protect("run", model=model, optimizer=optimizer) as run:
    for step in run.steps(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
import os
print("rest", os.getpid(), flush=True)
time.sleep(1000 if len(sys.argv) < 2 else 0)
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["launcher", "process", "shell", "torchrun"])
def test_b14_a_notice_after_the_last_step_brings_the_job_back(tmp_path: Path, how: str) -> None:
    """To the launcher, to the training process alone, below a shell that hides it, below torchrun, which says
    1."""
    (tmp_path / "train.py").write_text(AFTERWARDS)
    plain = f"{sys.executable} {tmp_path / 'train.py'}"
    command = {
        "shell": ["bash", "-c", f"{plain}; echo after"],
        "torchrun": [*TORCHRUN, tmp_path / "train.py"],
    }.get(how, plain.split())
    with Launched(tmp_path, command) as launched:  # type: ignore[arg-type]
        pid = int(launched.expect("rest"))
        if how == "launcher":
            launched.send()
        else:
            os.kill(pid, signal.SIGTERM)
        assert launched.wait() == 75, launched.log()
    assert (
        "Got SIGTERM after training had finished at step 3, during the rest of the script" in launched.log()
    )
    testing.assert_resumable(tmp_path / "run", 3, exact=True)
    if how == "launcher":
        with Launched(tmp_path, [sys.executable, tmp_path / "train.py", "quick"]) as again:
            assert again.wait() == 0, again.log()
            assert "done" in again.lines()


def test_b14_without_a_launcher_the_signal_is_the_scripts_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AFTERWARDS)
    process = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("rest")
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    process.stdout.close()
