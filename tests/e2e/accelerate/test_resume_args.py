"""B3: scripts that resume from a path that they are given: never 75 where the same command would begin anew,
and `lastcall run --resume-args` gives the path to the restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Nursery, environment, until
from lastcall.core.checkpoint import handover

SCRIPT = Path(__file__).parent / "scripts" / "no_trainer.py"
ON = {"LASTCALL_ENABLED": "1", "FORKED": "1", "LASTCALL_KILL_WAIT_SECONDS": "0"}
TOLD = 128 + signal.SIGTERM


def saved(out: Path) -> Path:
    found = handover.newest([out])
    assert found is not None
    return found.path


def test_b3_without_a_path_the_code_is_the_signals_own_and_the_log_says_what_to_add(
    accelerated: Nursery, tmp_path: Path
) -> None:
    """B3: saved, but the same command starts at 0: said at the first step, at the end, and at the next
    start."""
    out = tmp_path / "out"
    first = accelerated.start(tmp_path, SCRIPT, "--output_dir", out, **ON)
    chain.strike(first, chain.Blow(5, 0.0))
    assert first.wait() == TOLD, first.log()
    assert "`args.resume_from_checkpoint` keeps it from load_state() (no_trainer.py:" in first.log()
    assert (
        first.log().count("lastcall run --resume-args '--resume_from_checkpoint {path}' -- COMMAND") == 2
    ), first.log()
    path = saved(out)
    # The same command again: it begins anew, and says so. In the same job it does not even do that.
    again = accelerated.start(tmp_path, SCRIPT, "--output_dir", out, **ON)
    again.expect_log(f"{path} was saved for a restart")
    again.end()
    other = accelerated.run(
        tmp_path, SCRIPT, "--output_dir", tmp_path / "other", **ON, PAUSE="0", SLURM_JOB_ID="1"
    )
    assert other.code == 0 and "saved for a restart" not in other.log(), other.log()
    # With the path it goes on; to be told to stop then leads back to this path, not to what is saved.
    third = accelerated.start(
        tmp_path, SCRIPT, "--output_dir", out, "--resume_from_checkpoint", path, **ON, SLURM_JOB_ID="7"
    )
    third.expect("resumed")
    assert f"resumed {path.name.removeprefix('step_')}" in third.lines()
    chain.strike(third, chain.Blow(25, 0.0))
    assert third.wait() == TOLD, third.log()
    assert f"the command names {path}, and would resume from there again" in third.log()
    fourth = accelerated.run(tmp_path, SCRIPT, "--output_dir", out, **ON, PAUSE="0", SLURM_JOB_ID="7")
    assert fourth.code == 78 and "was saved for a restart" in fourth.log(), fourth.log()


def test_b3_lastcall_run_gives_the_path_to_every_restart(accelerated: Nursery, tmp_path: Path) -> None:
    """B3: also to the first start of a new launcher, as on another machine."""
    out, result, reference = tmp_path / "out", tmp_path / "result", tmp_path / "reference"
    plain = accelerated.run(
        tmp_path, SCRIPT, "--output_dir", tmp_path / "peace", "--result", reference, PAUSE="0"
    )
    assert plain.code == 0, plain.log()
    out.mkdir()

    def launch(*more: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "lastcall",
                "run",
                "--cloud",
                "none",
                "--platform",
                "plain",
                *more,
                "--resume-args",
                "--resume_from_checkpoint {path}",
                "--",
                sys.executable,
                str(SCRIPT),
                "--output_dir",
                str(out),
                "--result",
                str(result),
            ],
            env=environment(LASTCALL_KILL_WAIT_SECONDS="0", **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = launch()
    assert first.stdout is not None
    until(lambda: "at 5" in first.stdout.readline(), "step 5")  # type: ignore[union-attr]
    first.send_signal(signal.SIGTERM)
    _, log = first.communicate()
    assert first.returncode == 75, log
    begun = int(saved(out).name.removeprefix("step_"))
    # A restart in place: the training process alone is told.
    second = launch("--restart", "on-preempt", "--backoff", "0")
    assert second.stdout is not None
    seen: list[str] = []

    def reached() -> bool:
        seen.append(second.stdout.readline())  # type: ignore[union-attr]
        return f"at {begun + 5}" in seen[-1]

    until(reached, f"step {begun + 5}")
    (child,) = map(int, Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split())
    os.kill(child, signal.SIGTERM)
    rest, log = second.communicate()
    assert second.returncode == 0, log
    resumed = [line.split()[1] for line in ("".join(seen) + rest).splitlines() if line.startswith("resumed")]
    assert resumed[0] == str(begun) and len(resumed) == 2 and int(resumed[1]) > begun, resumed
    assert result.read_text() == reference.read_text()
