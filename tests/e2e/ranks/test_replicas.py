"""What is called a replica is one: survivors never write their own weights in the place of a lost rank's."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes.forkserver import PATIENCE, environment
from helpers.servers import ports
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.storage import files as storage

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import lastcall

rank, same = int(os.environ["RANK"]), sys.argv[2] == "same"
dist.init_process_group("gloo")
torch.manual_seed(0 if same else rank)
model = torch.nn.Linear(4, 4)  # no DistributedDataParallel: nothing says that the ranks hold the same
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with lastcall.protect(sys.argv[1], model=model, optimizer=optimizer) as run:
    for step in run.steps(2000):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
        if rank == 0 and step == 40:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["different", "same"])
def test_a2_survivors_save_for_a_lost_rank_only_what_was_seen_to_be_the_same(
    tmp_path: Path, kind: str
) -> None:
    """A2: an ensemble, hand-made pipeline stages. Rank 0 takes torch's store along when it is killed."""
    (tmp_path / "train.py").write_text(SCRIPT)
    port = str(ports.free_port())
    ranks = []
    for rank in range(2):
        env = environment(
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            LASTCALL_KILL_WAIT_SECONDS="0",
            LASTCALL_SPARE="0",
        )
        words = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run"), kind]
        with open(tmp_path / f"log-{rank}", "wb") as log:
            ranks.append(subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=log))
    try:
        assert ranks[0].wait(PATIENCE) == -signal.SIGKILL
        ranks[1].wait(PATIENCE)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = (tmp_path / "log-1").read_text()
    entries = Catalog(tmp_path / "run", storage.Files()).entries()
    if kind == "same":
        assert [entry.record.kind.value for entry in entries] == ["survivors"], said
    else:
        assert entries == [], said
        assert "rank 0 held the only copy of its shard" in said
