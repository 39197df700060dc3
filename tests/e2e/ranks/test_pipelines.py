"""The pipelines of data.md that two ranks share: DistributedSampler with set_epoch(), without, and with
epochs counted by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.forkserver import Child, Nursery
from helpers.ranks import jobs as ranks_jobs
from helpers.servers.ports import free_port

RANKS = 2


@pytest.fixture
def ranks(distributed: Nursery) -> Iterator[Nursery]:
    yield distributed
    distributed.clear()


def _lived(ranks: Nursery, folder: Path, loop: str, kill: int) -> list[Child]:
    folder.mkdir(exist_ok=True)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    script = ranks_jobs.SCRIPTS / "pipeline.py"
    made = [
        ranks.start(
            folder, script, folder / "run", loop, kill, **shared, RANK=str(rank), LOCAL_RANK=str(rank)
        )
        for rank in range(RANKS)
    ]
    for child in made:
        child.wait()
    return made


def _trained(child: Child) -> dict[Any, Any]:
    return dict(json.loads(line) for line in child.lines())


@pytest.mark.parametrize("kill", [5, pytest.param(17, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loop", ["set_epoch", pytest.param("no_set_epoch", marks=pytest.mark.slow), "steps"])
def test_a_sampler_that_ranks_share_goes_on(loop: str, kill: int, ranks: Nursery, tmp_path: Path) -> None:
    """G11: identical on both ranks, and nothing to warn of in the first incarnation."""
    whole = _lived(ranks, tmp_path / "whole", loop, -1)
    first = _lived(ranks, tmp_path / "killed", loop, kill)
    second = _lived(ranks, tmp_path / "killed", loop, kill)
    assert [child.code for child in (*whole, *first, *second)] == [0, 0, 75, 75, 0, 0], (
        first[0].log() + second[0].log()
    )
    for one, before, after in zip(whole, first, second, strict=True):
        assert {**_trained(before), **_trained(after)} == _trained(one)
        assert "will differ" not in before.log() + after.log()
