"""Killed without a word, at any moment: what was in shared memory is there again, whole, and at most one
interval old.

LASTCALL_TEST_GUARD_KILLS says how many kills at random moments (100 for the acceptance).
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Nursery, until
from lastcall import testing
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.core.guard import guard
from lastcall.core.startup import recovery
from lastcall.storage.files import Files
from lastcall.types import Kind

KILLS = int(os.environ.get("LASTCALL_TEST_GUARD_KILLS", "9"))
EVERY = 3  # steps between two copies
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
TRAIN = """
    import os
    import torch
    import lastcall
    from helpers.models import training

    training.seed()
    weights = torch.nn.Parameter(torch.zeros(400_000))
    norm = torch.nn.BatchNorm1d(8)
    optimizer = torch.optim.AdamW([weights, *norm.parameters()], lr=1e-3)
    with lastcall.protect(training.DIRECTORY, guard=True, weights=weights, norm=norm, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        for step in run.steps(int(os.environ["STEPS"])):
            norm(torch.randn(4, 8)).sum().backward()
            weights.grad = torch.randn_like(weights)
            optimizer.step()
            optimizer.zero_grad()
            training.say(step)
    training.finish(weights=weights, norm=norm, optimizer=optimizer)
"""  # noqa: E501
GUARDED = {"LASTCALL_GUARD_STEPS": str(EVERY)}


def snapshots(run: Path) -> int:
    """How many have been committed to shared memory by the process that runs now."""
    try:
        (path,) = guard.areas(run / ".lastcall" / guard.POINTER)
        return max(guard.Area.attach(Path(path)).commits())
    except ValueError:  # not there yet, or half made
        return 0


def newest(run: Path) -> int:
    entries = Catalog(run, Files()).entries()
    return entries[0].record.step if entries else 0


@pytest.mark.timeout(90 + 5 * KILLS)
def test_killed_at_random_moments_a_guarded_run_loses_at_most_one_interval(
    nursery: Nursery, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    dice = random.Random(seed)
    script = nursery.write(tmp_path, TRAIN)
    run = tmp_path / "run"
    for number in range(KILLS):
        before, signum = newest(run), SIGNALS[number % len(SIGNALS)]
        child = nursery.start(tmp_path, script, run, tmp_path / "result", STEPS=str(10**9), **GUARDED)
        until(lambda: snapshots(run) > 0, f"a first copy\n{child.log()}")
        time.sleep(dice.uniform(0.0, 0.1))
        child.send(signum)
        assert child.wait() == -signum, child.log()
        done = chain.position(child) + 1
        rescued = recovery.recover(run, signum.name)
        assert rescued is not None
        assert rescued.step > before
        entry = testing.assert_resumable(run, rescued.step, exact=True)
        assert (entry.record.kind, entry.record.reason) == (Kind.GUARD, signum.name)
        # While a copy is made, training can end one step more, and the one before is what counts.
        assert rescued.step >= done - EVERY - 1, (done, rescued, child.log())
        assert not (run / ".lastcall" / guard.POINTER).exists()
        assert not list(Path("/dev/shm").glob(f"lastcall-{os.getuid()}-{child.pid}-*"))


def test_a_chain_of_kills_ends_bit_identical_to_a_run_without_lastcall(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = nursery.write(tmp_path, TRAIN)
    reference, result, run = tmp_path / "reference", tmp_path / "result", tmp_path / "run"
    total = 1500
    plain = nursery.run(
        tmp_path, script, tmp_path / "unused", reference, STEPS=str(total), LASTCALL_ENABLED="0"
    )
    assert plain.code == 0, plain.log()
    for signum in SIGNALS:
        child = nursery.start(tmp_path, script, run, result, STEPS=str(total), **GUARDED)
        until(lambda: snapshots(run) > 0 or child.poll() is not None, f"a first copy\n{child.log()}")  # noqa: B023
        child.send(signum)
        child.wait()
        # the next incarnation itself finds the area and saves it before it resumes
    last = nursery.run(tmp_path, script, run, result, STEPS=str(total), **GUARDED)
    assert last.code == 0, last.log()
    assert "from shared memory" in last.log()
    assert result.read_text() == reference.read_text()


def test_too_little_shared_memory_is_said_at_the_start_with_the_size_needed(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = nursery.write(tmp_path, TRAIN)
    missing = tmp_path / "no-such-folder"
    child = nursery.run(
        tmp_path,
        script,
        tmp_path / "run",
        tmp_path / "result",
        STEPS="200",
        LASTCALL_GUARD_FOLDER=str(missing),
        **GUARDED,
    )
    assert child.code == 0, child.log()
    assert "This run is not guarded: two copies of its state need" in child.log()
    assert "--shm-size=" in child.log()
