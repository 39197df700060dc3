"""Where the script's own save point cannot be waited for, or there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import task

from helpers.ray import runs as ray_runs
from helpers.ray.cluster import Cluster
from helpers.ray.runs import NOTICES, Life, Run

STEPS = 120
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def reference() -> list[str]:
    return task.reference(2 * STEPS, world=2)


def interrupted(
    cluster: Cluster, folder: Path, script: str, *options: object, **env: str
) -> tuple[Run, Life, Life, str]:
    run = Run(folder, script, *options, **env)
    run.start(cluster)
    run.until_step(6)
    NOTICES["one worker"](run)
    run.until_life(2)
    run.until_step(run.lives()[0].reached + 2, life=2)
    said = run.finish()
    first, second = run.lives()
    return run, first, second, said


def test_a_save_that_is_too_far_away_is_replayed_at_a_step_and_the_record_says_that_batches_repeat(
    cluster: Cluster, tmp_path: Path, reference: list[str]
) -> None:
    run, first, second, said = interrupted(cluster, tmp_path, "long_epochs", LASTCALL_GRACE_SECONDS="12")
    assert second.began_at == first.reached and {start["digest"] for start in second.starts} == {
        reference[first.reached]
    }
    assert {start["epoch"] for start in second.starts} == {0}  # which was not complete
    (record,) = run.records()
    assert (record["how"], record["exact"]) == ("replay", False) and "none is skipped" in record["because"]
    assert "JIT checkpoint completed in" in said


@pytest.mark.slow
def test_one_line_of_code_saves_what_it_names_and_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    run, *_, said = interrupted(cluster, tmp_path, "protected")
    ray_runs.assert_nothing_lost(run, said, task.reference(STEPS, world=2))


@pytest.mark.slow
def test_without_any_save_model_and_optimizer_are_put_back_and_the_rest_is_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    run, first, second, said = interrupted(cluster, tmp_path, "without_save")
    last = max(first.steps, key=lambda step: step["updates"])
    begun = [step for step in second.steps if step["updates"] == first.reached + 1]
    assert {step["before"] for step in begun} == {last["weights"]} and len(begun) == run.workers
    assert "Restored what was saved after SIGTERM: Sequential, AdamW. Not restored:" in said
    assert run.folders() == []  # nothing that the script's own code would be handed
    # B6: it has ended well. Whoever uses its name again starts anew.
    run.start(cluster)
    assert "Restored what was saved" not in run.finish()
    begun = [step for step in run.lives()[2].steps if step["updates"] == 1]
    assert {step["before"] for step in begun} == {task.digest(task.new_model())}


@pytest.mark.slow
def test_b7_a_script_that_loads_by_the_recipe_of_dcp_keeps_its_own_save_in_every_life(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Run(tmp_path, "dcp_recipe")
    run.start(cluster)
    for number in (1, 2):
        run.until_life(number)
        run.until_step(run.lives()[-1].began_at + 5, life=number)
        NOTICES["one worker"](run)
    run.until_life(3)
    said = run.finish()
    first, second, third = run.lives()
    assert (first.reached, second.reached) == (second.began_at, third.began_at), "steps were lost"
    assert {end["digest"] for end in third.ends} == {task.reference(60, world=2)[-1]}
    assert "saves only when training is over" not in said


@pytest.mark.slow
@pytest.mark.parametrize("forgetful", [0, 1])
def test_b4_a_hugging_face_trainer_saves_its_own_checkpoint_at_the_end_of_a_step_and_goes_on_from_it(
    cluster: Cluster, tmp_path: Path, forgetful: int
) -> None:
    """`forgetful`: the script never asks for its checkpoint, as most of Ray's examples do not."""
    run, first, second, said = interrupted(cluster, tmp_path, "huggingface", "--forgetful", forgetful)
    last = max(first.steps, key=lambda step: step["updates"])
    assert second.began_at == first.reached and {start["digest"] for start in second.starts} == {
        last["digest"]
    }
    folder, _ = run.folders()  # and the one that every Trainer saves at its end
    state = json.loads((run.experiment / folder / "checkpoint" / "trainer_state.json").read_text())
    assert state["global_step"] == first.reached
    assert "JIT checkpoint completed in" in said
