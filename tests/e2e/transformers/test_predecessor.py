"""The replacement of a Trainer's pod starts while the one before it is still saving."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.forkserver import ROOT, Nursery
from helpers.trainer.interruption_chain import FORKED, PLAIN, QUICK

SLOW = ROOT / "tests" / "e2e" / "scripts" / "slow_disk.py"
FINETUNE = ROOT / "examples" / "finetune.py"


@pytest.fixture
def nursery(trainers: Nursery) -> Any:
    yield trainers
    trainers.clear()


def test_it_waits_for_the_save_and_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    peace = nursery.run(tmp_path, FORKED, FINETUNE, "--output-dir", tmp_path / "peace", **PLAIN)
    command: list[Any] = [FORKED, SLOW, FINETUNE, "--output-dir", tmp_path / "run"]
    env: dict[str, Any] = {**QUICK, "LASTCALL_GRACE_SECONDS": "600", "IMPATIENT": "1", "NO_LOCKS": "1"}
    first = nursery.start(tmp_path, *command, **env, SLOW_DISK="disk")
    first.expect("{'loss'")
    first.send(signal.SIGTERM)
    first.expect("waiting for the disk")
    second = nursery.start(tmp_path, *command, **env)
    second.expect_log(f"Waiting for process {first.pid} on ")
    (tmp_path / "disk").touch()
    assert first.wait() == 75, first.log()
    assert second.wait() == 0, second.log()
    assert "Resuming from checkpoint-" in second.log()
    assert second.expect("finished") == peace.expect("finished")
