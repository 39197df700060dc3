"""What a script's own save does to those around it: exceptions, trace functions, variables, other ranks,
other machines."""

from __future__ import annotations

import linecache
import textwrap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from helpers.script import programs as script_programs
from helpers.script import shapes as script_shapes
from helpers.script import steps as script_steps
from helpers.script.stage import Stage, enter, replay
from lastcall.script.source import sources

PLAIN = script_shapes.STEP_SHAPES["plain"]
SHAPES = {
    **script_shapes.EPOCH_SHAPES,
    **script_shapes.STEP_SHAPES,
    **script_programs.FAR,
    **script_steps.NEAR,
}


@pytest.mark.parametrize(
    "shape",
    [
        shape
        if "rank" in SHAPES[shape].rpartition("get_world_rank()")[2]
        else pytest.param(shape, marks=pytest.mark.slow)
        for shape in SHAPES
    ],
)
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, shape: str) -> None:
    zero, one = (Stage(tmp_path, SHAPES[shape], rank=rank, at=6, act=enter).run() for rank in (0, 1))
    assert zero.steps == one.steps <= 8
    assert zero.saved is not None


@pytest.mark.parametrize(
    ("test", "kept"),
    [
        ("isinstance(wanted, int) and step % every == 999", "`isinstance(wanted, int)`"),
        ("wanted is not None and step % wanted == 0", "`wanted is not None`"),
        ("wanted and step % wanted == 0", "`wanted`"),
        ("not wanted and step % every == 999", ""),
        ("step % every == 999 or wanted", ""),
        ("rank == 5 and step % every == 999", ""),
        ("loss < 0 and step % every == 999", ""),
    ],
)
def test_an_option_that_was_not_given_keeps_a_script_from_its_save(
    tmp_path: Path, test: str, kept: str
) -> None:
    """run_clm_no_trainer.py without --checkpointing_steps has a save in its loop, and never comes to it."""
    found: list[str] = []

    def act(stage: Stage, frame: FrameType) -> None:
        assert stage.script is not None
        found.append(stage.script.kept_from)

    source = PLAIN.replace("if step % every == 999:", f"if {test}:").replace(
        "every, rank =", "wanted = None\n    every, rank ="
    )
    assert "wanted = None" in source and f"if {test}:" in source
    Stage(tmp_path, source, at=3, act=act).run()
    assert found == [kept]


def test_an_exception_of_the_scripts_own_save_is_the_scripts(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path, PLAIN.replace('f"{folder}/state.pt"', 'f"{folder}/missing/state.pt"'), at=3, act=enter
    )
    with pytest.raises(RuntimeError, match="missing"):
        stage.run()
    assert stage.after == 0


def test_an_exception_that_the_script_handles_does_not_end_the_save(tmp_path: Path) -> None:
    source = PLAIN.replace(
        "torch.save(",
        "try:\n                    open('/nowhere/at/all')\n               "
        " except OSError:\n"
        "                    pass\n                torch.save(",
    )
    assert Stage(tmp_path, source, at=3, act=enter).run().saved is not None


def test_a_replay_that_fails_says_why_and_puts_the_counts_back(tmp_path: Path) -> None:
    held: list[Any] = []

    def act(stage: Stage, frame: FrameType) -> None:
        trainer = frame
        while "self" not in trainer.f_locals or "Trainer" not in str(trainer.f_locals["self"]):
            assert trainer.f_back is not None
            trainer = trainer.f_back
        held.append(trainer.f_locals["self"])
        replay(stage, frame)

    source = script_programs.FAR["class"].replace("train.report({}, write(", "train.report({}, broken(")
    stage = Stage(tmp_path, source, at=6, act=act).run()
    assert "broken" in stage.because and stage.saved is None
    assert held[0].epoch == 1 and held[0].step == 5


def test_without_a_save_a_replay_says_that_there_is_none(tmp_path: Path) -> None:
    source = PLAIN.replace(", checkpoint=Checkpoint.from_directory(folder)", "")
    assert "no frame of the training loop" in Stage(tmp_path, source, at=3, act=replay).run().because


def test_a_trace_function_of_somebody_else_is_put_back(tmp_path: Path) -> None:
    seen: list[str] = []

    def theirs(frame: FrameType, event: str, arg: Any) -> None:
        seen.append(frame.f_code.co_name)

    stage = Stage(tmp_path, PLAIN, at=3, act=enter)
    stage.trace = theirs
    stage.run()
    assert stage.trace is theirs
    assert "save" in seen  # torch.save, called while ours was at work


def test_it_is_given_up_when_told_so(tmp_path: Path) -> None:
    def act(stage: Stage, frame: FrameType) -> None:
        enter(stage, frame)
        assert stage.script is not None
        stage.script.cancel()

    stage = Stage(tmp_path, script_shapes.EPOCH_SHAPES["no other report"], at=3, act=act).run()
    assert stage.reports == [] and len(stage.seen) == stage.steps


def test_the_way_to_a_save_is_learned_where_the_source_does_not_tell(tmp_path: Path) -> None:
    source = script_shapes.LEARNING + script_programs.WRITE + textwrap.dedent("""
        class Events:
            def __init__(self):
                self.handlers = {}

            def fire(self, name, *args):
                for handler in self.handlers.get(name, []):
                    handler(*args)

        def main(config):
            model, optimizer = make()
            events = Events()

            def save(step):
                if step % 3 == 0:
                    with tempfile.TemporaryDirectory() as folder:
                        train.report({}, checkpoint=write(folder, model, optimizer, step=step))

            events.handlers["step"] = [save]
            for step in range(begin(model, optimizer).get("step", -1) + 1, EPOCHS * len(LOADER)):
                learn(model, optimizer, LOADER[step % len(LOADER)])
                seen(step)
                events.fire("step", step)
    """)  # fmt: skip
    stage = Stage(tmp_path, source, at=6, act=enter).run()
    assert stage.saved is not None and stage.steps == 6
    assert torch.load(stage.saved / "state.pt")["step"] == 5


def test_a_source_that_another_machine_sent_is_as_good_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    stage = Stage(tmp_path, PLAIN, at=3, act=enter)
    code = compile(path.read_text(), str(path), "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    sent = sources.gather(space["main"])
    path.unlink()
    linecache.clearcache()
    assert stage.run_code(code).saved is None
    sources.provide(sent)
    again = Stage(tmp_path.parent, PLAIN, at=3, act=enter)  # its file is elsewhere
    assert again.run_code(code).saved is not None
