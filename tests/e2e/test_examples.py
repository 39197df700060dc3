"""Every example runs, and does what it says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import ROOT, Nursery, environment, until

EXAMPLES = ROOT / "examples"
NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0"}


def test_there_is_a_test_for_every_example() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "minimal.py",
        "train.py",
        "demo.py",
        "plain.py",
        "finetune.py",  # in tests/e2e/transformers
        "ray_vanilla.py",  # in tests/ray
    }


@pytest.mark.smoke
def test_the_minimal_example_goes_on_where_it_was(nursery: Nursery, tmp_path: Path) -> None:
    script = EXAMPLES / "minimal.py"
    reference = nursery.run(tmp_path, script, tmp_path / "reference")
    assert reference.code == 0, reference.log()
    assert reference.lines()[0].startswith("finished 1000 steps")

    first = nursery.start(tmp_path, script, tmp_path / "run", **NOW)
    until(lambda: "Starting from the beginning" in first.log(), first.log())
    first.send(signal.SIGTERM)
    assert first.wait() == 75, first.log()
    second = nursery.run(tmp_path, script, tmp_path / "run")
    assert second.code == 0, second.log()
    assert "Resuming from checkpoint-" in second.log()
    assert second.lines() == reference.lines()


def test_the_training_example_ends_the_same_after_interruptions(nursery: Nursery, tmp_path: Path) -> None:
    script = EXAMPLES / "train.py"
    arguments = ("--epochs", 2, "--samples", 160, "--print-steps", 1)
    plain = nursery.run(
        tmp_path,
        script,
        tmp_path / "unused",
        *arguments,
        "--result",
        tmp_path / "reference",
        LASTCALL_ENABLED="0",
    )
    assert plain.code == 0, plain.log()
    for said in ("epoch 0 step 1/", "epoch 1 step 8/", "evaluating after epoch 1"):
        child = nursery.start(
            tmp_path, script, tmp_path / "run", *arguments, "--result", tmp_path / "result", **NOW
        )
        child.expect(said, "finished")
        child.send_group(signal.SIGTERM)
        assert child.wait() in (0, 75, -signal.SIGTERM), child.log()  # the last may come after the block
    last = nursery.run(tmp_path, script, tmp_path / "run", *arguments, "--result", tmp_path / "result")
    assert last.code == 0, last.log()
    assert (tmp_path / "result").read_text() == (tmp_path / "reference").read_text()
    assert len(chain.records(tmp_path / "run")) >= 1


def test_the_demo_survives_five_preemptions_and_proves_it() -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--seed", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("SIGTERM", "SIGKILL"))]
    assert [row.split()[0] for row in rows] == ["SIGTERM"] * 4 + ["SIGKILL"]
    assert all("exact" in row and "not exact" not in row for row in rows)
    assert done.stdout.endswith("The final states are identical, bit for bit.\n")
