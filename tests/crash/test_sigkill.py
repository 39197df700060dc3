"""SIGKILL at any instant, and a disk that fails in any place: the run always resumes, never from something
torn, never from something older than what was committed.

LASTCALL_TEST_KILLS says how many kills at random moments (200 for the acceptance); from 100 on, each error is
tried at each operation, and not one of two.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery, until
from lastcall import testing

KILLS = int(os.environ.get("LASTCALL_TEST_KILLS", "8"))
SHARDS = 2  # processes that share the faults
OPERATIONS = Path(__file__).parent / "scripts" / "operations.py"
TRAIN = """
    import os
    import torch
    import lastcall
    from helpers.models import training

    training.seed()
    weights = torch.nn.Parameter(torch.zeros(500_000))
    optimizer = torch.optim.AdamW([weights], lr=1e-3)
    with lastcall.protect(training.DIRECTORY, weights=weights, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        for step in run.steps(int(os.environ["STEPS"])):
            training.say(step)
            weights.grad = torch.randn_like(weights)
            optimizer.step()
    training.finish(weights=weights, optimizer=optimizer)
"""
COMMITTED = re.compile(r"checkpoint of step (\d+) completed")
ALWAYS = {"LASTCALL_SAVE_STEPS": "1", "LASTCALL_SAVE_TOTAL_LIMIT": "2"}


def kill_in_a_save(child: Child, run: Path, step: int, delay: float) -> None:
    """SIGKILL once it is at that step and something is being written, or something has just been."""
    until(lambda: chain.position(child) >= step, f"step {step}\n{child.log()}")
    staging = run / ".lastcall" / "staging"
    until(lambda: any(staging.glob("checkpoint-*")), f"a save\n{child.log()}")
    time.sleep(delay)
    child.send_group(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.log()


@pytest.mark.timeout(60 + 5 * KILLS)
def test_killed_at_random_moments_of_its_saves_a_run_loses_nothing_that_was_committed(
    nursery: Nursery, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    dice = random.Random(seed)
    total = 5 * KILLS + 10
    script = nursery.write(tmp_path, TRAIN)
    reference, result, run = tmp_path / "reference", tmp_path / "result", tmp_path / "run"
    plain = nursery.run(
        tmp_path, script, tmp_path / "unused", reference, STEPS=str(total), LASTCALL_ENABLED="0"
    )
    assert plain.code == 0, plain.log()

    committed = 0
    for step in sorted(dice.sample(range(5 * KILLS), KILLS)):
        child = nursery.start(tmp_path, script, run, result, STEPS=str(total), **ALWAYS)
        kill_in_a_save(child, run, step, dice.uniform(0.0, 0.06))
        assert int(child.expect("resumed").split()[1].replace("None", "0")) >= committed
        committed = max([committed, *map(int, COMMITTED.findall(child.log()))])
        if committed:
            assert testing.assert_resumable(run, exact=True).record.step >= committed
    last = nursery.run(tmp_path, script, run, result, STEPS=str(total), **ALWAYS)
    assert last.code == 0, last.log()
    assert result.read_text() == reference.read_text()
    assert "set aside" not in last.log()


def lives(nursery: Nursery, folder: Path, *kinds: str) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """How often each operation is called in a life, and what came of a life with each fault, in order."""
    children = []
    for shard in range(SHARDS):
        (folder / str(shard)).mkdir()
        children.append(nursery.start(folder, OPERATIONS, folder / str(shard), shard, SHARDS, *kinds))
    for child in children:
        assert child.wait(1500) == 0, child.log()
    said = [[json.loads(line) for line in child.lines()] for child in children]
    counts = [first["calls"] for first, *_ in said]
    assert all(count == counts[0] for count in counts)  # otherwise some operations were never hit
    results = sorted(
        (result for _, *rest in said for result in rest), key=lambda one: (one["kind"], one["number"])
    )
    for result in results:
        assert result["checked"] == 0, result["log"]
    return counts[0], results


@pytest.mark.timeout(600)
def test_killed_at_each_file_operation_in_turn_a_run_resumes_from_the_last_commit(
    nursery: Nursery, tmp_path: Path
) -> None:
    calls, results = lives(nursery, tmp_path, "kill")
    assert [result["code"] for result in results] == [-signal.SIGKILL] * calls["any"]
    resumed = [result["resumed"] for result in results]
    assert resumed == sorted(resumed)  # the later the kill, the newer what is there
    assert set(resumed) == {3, 4, 5}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["mixed"] if KILLS < 100 else ["ENOSPC", "EIO"])
def test_an_operation_that_fails_once_costs_nothing(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    calls, results = lives(nursery, tmp_path, kind)
    assert len(results) == calls["any"]
    assert {(result["code"], result["resumed"]) for result in results} == {(75, 5)}


@pytest.mark.timeout(600)
def test_failing_fsyncs_and_short_writes_cost_nothing(nursery: Nursery, tmp_path: Path) -> None:
    calls, results = lives(nursery, tmp_path, "fsync", "short")
    assert len(results) == calls["fsync"] + calls["pwrite"]
    assert {(result["code"], result["resumed"]) for result in results} == {(75, 5)}


@pytest.mark.timeout(600)
def test_a_disk_that_stays_full_leaves_what_was_committed(nursery: Nursery, tmp_path: Path) -> None:
    _, results = lives(nursery, tmp_path, "lasting")
    codes = [result["code"] for result in results]
    assert set(codes) <= {75, -signal.SIGTERM}
    assert codes[0] == -signal.SIGTERM  # the first operation of all fails, and all that follow
    resumed = [result["resumed"] for result in results]
    assert resumed == sorted(resumed)
    assert all(result["resumed"] == 5 for result in results if result["code"] == 75)
