"""What the pretended worlds of the other files cannot show: four processes that really train together hold
what they say they hold."""

from __future__ import annotations

from pathlib import Path

from helpers.processes.forkserver import ROOT, Nursery

SCRIPT = ROOT / "tests" / "e2e" / "scripts" / "ranks_state_pieces.py"


def test_four_ranks_hold_every_tensor_together(nursery: Nursery, tmp_path: Path) -> None:
    ranks = [nursery.start(tmp_path, SCRIPT, tmp_path / "rendezvous", rank) for rank in range(4)]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * 4, "\n".join(rank.log() for rank in ranks)
    for rank in ranks:
        assert rank.lines() == [
            "hsdp [(0, 2), (1, 3)]",
            "both [(0,), (0, 1), (1,), (2,), (2, 3), (3,)]",
            "ddp [(0, 1, 2, 3)]",
        ]
