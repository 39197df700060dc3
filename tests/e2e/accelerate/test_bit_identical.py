"""A loop around an Accelerator, interrupted and started again, ends with the very bits of one never
interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Nursery

SCRIPT = Path(__file__).parent / "scripts" / "loop.py"
QUICK = {"LASTCALL_KILL_WAIT_SECONDS": "0"}


def compare(nursery: Nursery, folder: Path, plan: list[chain.Blow], **env: str) -> chain.Chain:
    reference, result = folder / "reference", folder / "result"
    plain = nursery.run(folder, SCRIPT, folder / "unused", reference, **env, LASTCALL_ENABLED="0")
    assert plain.code == 0, plain.log()
    assert not (folder / "unused").exists()
    history = chain.run(nursery, folder, SCRIPT, plan, folder / "run", result, **{**QUICK, **env})
    assert result.read_text() == reference.read_text(), f"{history.codes}\n" + "\n".join(history.logs)
    assert "repeated or missed" not in "".join(history.logs)
    return history


@pytest.mark.parametrize(
    "loop",
    [pytest.param("epochs", marks=pytest.mark.smoke), "steps", pytest.param("tick", marks=pytest.mark.slow)],
)
def test_interruptions_leave_no_trace(accelerated: Nursery, tmp_path: Path, loop: str) -> None:
    history = compare(accelerated, tmp_path, chain.blows(len(loop), 5, 30), LOOP=loop)
    assert history.interruptions == 5, history.codes


@pytest.mark.parametrize(
    "loader", [pytest.param("workers", marks=pytest.mark.slow), "stateful", "stream", "dispatched"]
)
def test_other_loaders_leave_no_trace(accelerated: Nursery, tmp_path: Path, loader: str) -> None:
    history = compare(accelerated, tmp_path, chain.blows(7, 3, 30), LOADER=loader)
    assert history.interruptions == 3, history.codes


def test_an_interruption_at_every_single_boundary_leaves_no_trace(
    accelerated: Nursery, tmp_path: Path
) -> None:
    history = compare(accelerated, tmp_path, [], INTERRUPT="1")
    assert history.codes.count(chain.SAVED) >= 18, history.codes  # six steps in each of three epochs
