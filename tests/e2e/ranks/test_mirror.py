"""Two ranks on one directory, which is lost: one of them has copied what both have saved."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from helpers.processes import interruption_chain as chain
from helpers.ranks import trials as ranks_trials
from helpers.ranks.jobs import Launcher
from helpers.ranks.plan import Plan
from helpers.ranks.trials import References
from helpers.servers.s3 import Server

PLAN = Plan(steps=24, seconds=0.02)


def test_below_torchrun_a_directory_that_is_lost_costs_not_a_single_step(
    launcher: Launcher, references: References, server: Server, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    env = {"LASTCALL_MIRROR": "s3://runs/exp1", **server.environment}
    first = launcher.launch("ddp.py", 2, "torchrun", directory, PLAN, **env)
    assert first.until(1, "at", 6), first.log()
    first.send(1, signal.SIGTERM)
    first.wait()
    (record,) = chain.records(server.folder / "runs" / "exp1")
    assert record["world"] == 2 and record["kind"] == "jit", first.log()
    shutil.rmtree(directory)
    second = launcher.launch("ddp.py", 2, "agent", directory, PLAN, **env)
    assert set(second.wait().values()) == {0}, second.log()
    assert f"Fetched checkpoint-{record['step']}" in second.log()
    assert ranks_trials.reference(second.journals()).final == references.of("ddp.py", 2, PLAN).final
    assert [found["step"] for found in chain.records(server.folder / "runs" / "exp1")] == [record["step"], 24]
