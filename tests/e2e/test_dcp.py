"""lastcall.dcp with real ranks and FSDP2: one process that forks them, since importing torch takes longer
than all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes.forkserver import environment

SCRIPT = Path(__file__).parent / "scripts" / "dcp_ranks.py"
JOBS = ["save,load,refuse,load@2", "load@1", "load,hsdp@4", "save@1", "load@2"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path_factory.mktemp("dcp")), *JOBS]
    done = subprocess.run(
        command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=170
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(JOBS), done.stderr
    assert "AssertionError" not in done.stderr, done.stderr
    return lines


def test_two_ranks_save_and_load_and_one_that_cannot_stops_both(ended: list[str]) -> None:
    assert ended[0] == "0 save,load,refuse,load@2 [0, 0]"


def test_what_two_ranks_saved_is_loaded_by_one_and_by_four_and_replicas_of_shards_share_the_work(
    ended: list[str],
) -> None:
    assert ended[1:3] == ["1 load@1 [0]", "2 load,hsdp@4 [0, 0, 0, 0]"]


def test_what_one_rank_saved_is_loaded_by_two(ended: list[str]) -> None:
    assert ended[3:] == ["3 save@1 [0]", "4 load@2 [0, 0]"]
