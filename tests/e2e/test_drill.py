"""`lastcall drill` on real training: what it reports is what happened. The many ways to fail are in
unit/drill/test_runner.py."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.drill import harness
from helpers.processes.forkserver import ROOT
from lastcall import testing

PLAIN = ROOT / "examples" / "plain.py"
SLOW = """
import sys, time
import torch
import lastcall
from lastcall.storage import files

class SlowFiles(files.Files):
    def fsync(self, fd):
        time.sleep(600)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with lastcall.protect(sys.argv[1], files=SlowFiles(), model=model, optimizer=optimizer) as run:
    for _ in run.steps(1_000_000):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
"""


def test_the_plain_example_survives_its_rounds_and_goes_on_to_its_end_and_cannot_be_drilled_then(
    tmp_path: Path,
) -> None:
    command = ("--", sys.executable, PLAIN, "run", "--steps", 200)
    done = harness.drill(tmp_path, "--at", 10, "--times", 2, "--to-the-end", "--json", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    body = harness.reported(done)
    assert body["ok"] and body["lost"] == 0 and body["directories"] == [str(tmp_path / "run")]
    assert body["end"] == {"how": "finished", "exit": 0, "saved": True}
    for one in body["rounds"]:
        (run,) = one["directories"]
        assert (one["exit"], one["exact"], one["killed"], one["lost"]) == (75, True, False, 0)
        assert run["saved"] == run["resumed"] and run["saved"]["kind"] == "jit" and run["outcome"] == "saved"
        assert run["saved"]["step"] >= one["step"] >= 10
        seconds = one["seconds"]
        assert seconds["noticed"] <= seconds["save_begins"] <= seconds["committed"] <= seconds["gone"]
        assert 0 < seconds["resumed"] <= seconds["first_step"]
    assert testing.assert_resumable(tmp_path / "run").record.step == 200

    again = harness.drill(tmp_path, *command)
    assert again.returncode == 1
    assert (
        "the run finished before the notice of round 1" in again.stdout
        and "a fresh directory" in again.stdout
    )
    assert "The run has finished, exit code 0." in again.stdout


def test_a_save_that_is_too_slow_for_the_grace_is_killed_and_loses_its_steps(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    done = harness.drill(
        tmp_path, "--after", 0.5, "--grace", 2, "--", sys.executable, "slow.py", "run", LASTCALL_SPARE="0"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    row, _ = [line for line in done.stdout.splitlines() if line.startswith("    1  ")]  # two tables
    assert "SIGKILL  the beginning" in row and row.endswith("LOST, killed") and ">= " in row
    assert "lost: no checkpoint was committed in the grace of 2 s, and it was killed" in done.stdout
    assert "the run assumed a grace of 30 s, but it is 2 s. Set LASTCALL_GRACE_SECONDS=2" in done.stdout
    assert "The drill killed the run without a checkpoint, exit code 137." in done.stdout
    kept = Path(done.stdout.splitlines()[-1].split()[-1])
    assert "SIGTERM received" in kept.read_text()


def test_lastcall_run_saves_what_a_shell_would_lose(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"'{sys.executable}' '{PLAIN}' run\necho the script went on\n")
    launcher = (sys.executable, "-m", "lastcall", "run", "--cloud", "none", "--", "bash", "train.sh")
    done = harness.drill(tmp_path, "--after", 0.5, "--json", "--", *launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    body = harness.reported(done)
    (one,) = body["rounds"]
    assert (one["exit"], one["lost"], one["exact"], one["killed"]) == (75, 0, True, False)
    assert body["directories"] == [str(tmp_path / "run")]
    assert body["end"] == {"how": "stopped", "exit": 75, "saved": True}
