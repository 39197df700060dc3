from __future__ import annotations

from typing import Any

from lastcall.adapters.ray.worker import decisions


def at(
    step: int,
    *,
    looked: bool = True,
    points: bool = True,
    near: bool = False,
    seconds: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {"step": step, "looked": looked, "points": points, "near": near, "seconds": seconds, **more}


def test_the_step_is_one_that_no_rank_has_passed() -> None:
    assert decisions.first({0: at(7, near=True), 1: at(9, near=True)}, 20.0)["step"] == 10


def test_a_save_point_in_the_step_loop_is_waited_for_as_long_as_there_is_time() -> None:
    found = decisions.first({0: at(1, near=True), 1: at(1, near=True)}, 20.0)
    assert (found["how"], found["within"]) == ("own", 20.0)


def test_a_save_point_of_unknown_distance_gets_half_of_the_time() -> None:
    found = decisions.first({0: at(1), 1: at(1)}, 20.0)
    assert (found["how"], found["within"]) == ("own", 10.0)


def test_a_save_point_that_comes_in_time_is_waited_for_a_little_longer_than_expected() -> None:
    found = decisions.first({0: at(1, seconds=4.0), 1: at(1, seconds=5.0)}, 20.0)
    assert found["how"] == "own" and 5.0 < found["within"] < 20.0


def test_a_save_point_that_is_too_far_away_is_replayed_with_the_reason() -> None:
    found = decisions.first({0: at(1, seconds=90.0), 1: at(1, seconds=80.0)}, 20.0)
    assert found["how"] == "replay" and "90 s away" in found["because"]


def test_without_a_save_of_its_own_on_one_rank_no_rank_uses_it() -> None:
    found = decisions.first({0: at(1, near=True), 1: at(1, points=False, because="no source")}, 20.0)
    assert (found["how"], found["because"]) == ("state", "no source")


def test_a_rank_that_is_in_its_save_when_time_is_up_is_joined_by_the_others() -> None:
    assert decisions.again({0: at(5, inside=True), 1: at(4, inside=False)}, 6.0)["how"] == "own"


def test_when_no_rank_has_reached_its_save_in_time_it_is_replayed() -> None:
    found = decisions.again({0: at(5, inside=False), 1: at(6, inside=False)}, 6.0)
    assert (found["how"], found["step"]) == ("replay", 7)


def test_before_the_first_step_nobody_knows_and_the_script_gets_half_of_the_time_to_come_to_it() -> None:
    found = decisions.first(
        {0: at(0, looked=False, points=False), 1: at(0, looked=False, points=False)}, 20.0
    )
    assert (found["how"], found["within"], found["step"]) == ("own", 10.0, 1)


def test_a_script_that_turns_out_to_have_no_save_has_its_state_saved() -> None:
    assert decisions.again({0: at(3, points=False, because="no source"), 1: at(3)}, 6.0)["how"] == "state"


def test_a_trainer_saves_by_itself() -> None:
    assert decisions.first({0: at(3, points=False, framework=True)}, 20.0)["how"] == "framework"


def reported(*, checkpoint: bool, replayed: bool = False, files: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"checkpoint": checkpoint, "replayed": replayed, "files": list(files)}


def test_a_report_saves_if_any_rank_brings_a_checkpoint() -> None:
    found = decisions.report(
        {0: reported(checkpoint=True, files=("model.pt",)), 1: reported(checkpoint=False)}, 2
    )
    assert (found["saving"], found["missing"], found["torn"]) == ([0], [], False)


def test_ranks_that_do_not_come_to_a_report_are_named() -> None:
    assert decisions.report({0: reported(checkpoint=True)}, 3)["missing"] == [1, 2]


def test_parts_of_different_steps_are_no_checkpoint() -> None:
    found = decisions.report({0: reported(checkpoint=True), 1: reported(checkpoint=True, replayed=True)}, 2)
    assert "different steps" in decisions.flaw(found, None)


def test_a_checkpoint_of_parts_is_not_whole_without_the_missing_rank() -> None:
    said = {
        0: reported(checkpoint=True, files=("shard-0",)),
        1: reported(checkpoint=True, files=("shard-1",)),
    }
    assert "rank 2 are missing" in decisions.flaw(decisions.report(said, 3), None)


def test_a_checkpoint_with_other_files_than_the_one_before_is_not_trusted() -> None:
    found = decisions.report({0: reported(checkpoint=True, files=("shard-0",))}, 2)
    assert "other files" in decisions.flaw(found, ["shard-0", "shard-1"])


def test_a_checkpoint_with_the_files_of_the_one_before_is_whole() -> None:
    found = decisions.report({0: reported(checkpoint=True, files=("epoch.pt", "model.pt"))}, 2)
    assert decisions.flaw(found, ["model.pt", "epoch.pt"]) == ""


def test_a_report_that_a_rank_had_passed_before_the_notice_is_not_the_save() -> None:
    found = decisions.report(
        {0: {"checkpoint": False, "passed": True}, 1: {"checkpoint": True, "files": ["a"]}}, 2
    )
    assert (found["saving"], found["missing"], found["files"]) == ([], [], [])


def test_b9_a_script_that_handles_a_preemption_itself_keeps_its_own_flow_although_only_one_rank_knows_it_yet() -> (  # noqa: E501
    None
):
    assert decisions.first({0: at(3, near=True, native=True), 1: at(3, near=True)}, 20.0)["how"] == "native"


def test_b5_a_script_with_checkpoints_of_its_own_has_no_state_saved_that_nobody_would_put_back() -> None:
    found = decisions.first(
        {0: at(3, points=False, because="no source", checkpoints=True), 1: at(3, points=False)}, 20.0
    )
    assert found["how"] == "period" and "no source" in found["because"]
    assert decisions.again({0: at(3, points=False, checkpoints=True)}, 6.0)["how"] == "period"
