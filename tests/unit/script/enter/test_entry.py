"""The script's own save is taken as though its condition were true: nothing is trained twice, nothing left
out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.script import programs as script_programs
from helpers.script import shapes as script_shapes
from helpers.script import steps as script_steps
from helpers.script.stage import BATCHES, EPOCHS, Stage, enter

STEPS = BATCHES * EPOCHS
SHAPES = {
    **{f"epochs: {name}": source for name, source in script_shapes.EPOCH_SHAPES.items()},
    **{f"steps: {name}": source for name, source in script_shapes.STEP_SHAPES.items()},
    **{f"far: {name}": source for name, source in script_programs.FAR.items()},
    **{f"near: {name}": source for name, source in script_steps.NEAR.items()},
}


@pytest.mark.parametrize("at", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_that_saved_its_own_way_goes_on_where_it_was(tmp_path: Path, shape: str, at: int) -> None:
    whole = Stage(tmp_path, SHAPES[shape]).run()
    assert len(whole.seen) == STEPS
    first = Stage(tmp_path, SHAPES[shape], at=at, act=enter).run()
    assert first.script is not None and first.script.points, first.script
    assert first.saved is not None
    assert at <= first.steps < at + BATCHES
    second = Stage(tmp_path, SHAPES[shape], checkpoint=first.saved).run()
    assert first.seen + second.seen == whole.seen
    for one, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
