"""Where the save point is far away, its statements are run at a completed step: batches may be repeated, none
is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.script import programs as script_programs
from helpers.script import shapes as script_shapes
from helpers.script import steps as script_steps
from helpers.script.stage import BATCHES, EPOCHS, Stage, replay

STEPS = BATCHES * EPOCHS
SHAPES = {
    **{f"epochs: {name}": source for name, source in script_shapes.EPOCH_SHAPES.items()},
    **{f"steps: {name}": source for name, source in script_shapes.STEP_SHAPES.items()},
    **{f"far: {name}": source for name, source in script_programs.FAR.items()},
    **{f"near: {name}": source for name, source in script_steps.NEAR.items()},
}


@pytest.mark.parametrize("at", [11, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 4))])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_save_in_the_middle_of_an_epoch_leaves_no_batch_out(tmp_path: Path, shape: str, at: int) -> None:
    whole = Stage(tmp_path, SHAPES[shape]).run()
    first = Stage(tmp_path, SHAPES[shape], at=at, act=replay).run()
    assert first.saved is not None, first.because
    state = torch.load(first.saved / "state.pt")
    for one, other in zip(state["model"].values(), first.model.parameters(), strict=True):
        assert torch.equal(one, other)  # of this very step
    second = Stage(tmp_path, SHAPES[shape], checkpoint=first.saved).run()
    done = len(whole.seen) - len(second.seen)
    assert second.seen == whole.seen[done:]
    assert at - BATCHES <= done <= at
