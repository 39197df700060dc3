"""Interrupted at random moments and started again each time, a run ends with the very bits of one never
interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Nursery

SCRIPTS = Path(__file__).parent / "scripts"
QUICK = {"LASTCALL_KILL_WAIT_SECONDS": "0"}


def compare(
    nursery: Nursery, folder: Path, name: str, *, seed: int, count: int, steps: int, **env: str
) -> chain.Chain:
    """The script without lastcall, and with it under `count` signals: the same state in the end."""
    script = SCRIPTS / name
    reference, result = folder / "reference", folder / "result"
    plain = nursery.run(folder, script, folder / "unused", reference, LASTCALL_ENABLED="0", **env)
    assert plain.code == 0, plain.log()
    assert not (folder / "unused").exists()
    plan = chain.blows(seed, count, steps)
    history = chain.run(nursery, folder, script, plan, folder / "run", result, **{**QUICK, **env})
    assert result.read_text() == reference.read_text(), f"seed {seed}, {history.codes}\n" + "\n".join(
        history.logs
    )
    assert history.interruptions == count, history.codes
    assert "repeated or missed" not in "".join(history.logs)  # a warning where nothing has changed
    return history


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("steps.py", 70, marks=pytest.mark.smoke),
        ("accumulate.py", 70),
        ("two_optimizers.py", 50),
        ("scaler.py", 50),
        ("batchnorm.py", 70),
        ("cycled.py", 60),
        ("tick.py", 50),
        ("stateful.py", 50),
        ("step_first.py", 50),
        ("fast.py", 8000),
    ],
)
def test_five_interruptions_leave_no_trace(nursery: Nursery, tmp_path: Path, name: str, steps: int) -> None:
    compare(nursery, tmp_path, name, seed=len(name), count=5, steps=steps)


def test_twenty_interruptions_leave_no_trace(nursery: Nursery, tmp_path: Path) -> None:
    history = compare(nursery, tmp_path, "epochs.py", seed=20, count=20, steps=150, EPOCHS="6")
    assert history.codes.count(chain.SAVED) >= 19  # the first one may come before the handler is there


@pytest.mark.parametrize("workers", ["persistent", "fresh"])
def test_epochs_with_workers_and_accumulation_leave_no_trace(
    nursery: Nursery, tmp_path: Path, workers: str
) -> None:
    compare(nursery, tmp_path, "epochs.py", seed=7, count=6, steps=75, LOADER=workers)


def test_a_cycled_loader_with_workers_leaves_no_trace(nursery: Nursery, tmp_path: Path) -> None:
    compare(nursery, tmp_path, "cycled.py", seed=3, count=4, steps=60, WORKERS="2")


def test_periodic_saves_and_a_kill_wait_change_nothing(nursery: Nursery, tmp_path: Path) -> None:
    env = {"LASTCALL_SAVE_STEPS": "5", "LASTCALL_KILL_WAIT_SECONDS": "0.05", "LASTCALL_SAVE_TOTAL_LIMIT": "2"}
    compare(nursery, tmp_path, "steps.py", seed=11, count=5, steps=60, **env)


@pytest.mark.parametrize(
    ("name", "fewest"),
    [("epochs.py", 20), ("validation.py", 24), ("accumulate.py", 14), ("loops.py", 33)],
)
def test_an_interruption_at_every_single_boundary_leaves_no_trace(
    nursery: Nursery, tmp_path: Path, name: str, fewest: int
) -> None:
    reference, result = tmp_path / "reference", tmp_path / "result"
    script, env = SCRIPTS / name, {"STEPS": "14", "INTERRUPT": "1", **QUICK}
    assert (
        nursery.run(tmp_path, script, tmp_path / "unused", reference, LASTCALL_ENABLED="0", **env).code == 0
    )
    history = chain.run(nursery, tmp_path, script, [], tmp_path / "run", result, **env)
    assert result.read_text() == reference.read_text(), "\n".join(history.logs)
    assert history.codes.count(chain.SAVED) >= fewest


@pytest.mark.parametrize(("shape", "fewest"), [("rare", 14), ("anew", 15), ("broken", 11)])
def test_loops_of_unusual_shape_leave_no_trace_either(
    nursery: Nursery, tmp_path: Path, shape: str, fewest: int
) -> None:
    reference, result = tmp_path / "reference", tmp_path / "result"
    script, env = SCRIPTS / "shapes.py", {"SHAPE": shape, "INTERRUPT": "1", **QUICK}
    assert (
        nursery.run(tmp_path, script, tmp_path / "unused", reference, LASTCALL_ENABLED="0", **env).code == 0
    )
    history = chain.run(nursery, tmp_path, script, [], tmp_path / "run", result, **env)
    assert result.read_text() == reference.read_text(), "\n".join(history.logs)
    assert history.codes.count(chain.SAVED) >= fewest
