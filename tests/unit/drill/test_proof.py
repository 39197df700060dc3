"""What `lastcall drill --prove` concludes from what two runs said of themselves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lastcall.cli import proof_report
from lastcall.core.proof.witness import Statement
from lastcall.drill import causes, proof
from lastcall.drill.evidence import CommittedCheckpoint
from lastcall.drill.options import DrillOptions


def said(incarnation: int, step: int, names: Mapping[str, str] = {}, *, rank: int = 0) -> Statement:
    return Statement(
        rank, 1, incarnation, step, 0, {"model.weight": f"w{step}", "optimizer.groups.0.lr": "0.1", **names}
    )


def verdict(because: str = "") -> proof.ProofVerdict:
    return proof.ProofVerdict(
        DrillOptions(("x",)), 4, resumed=[CommittedCheckpoint("checkpoint-2", 2, "jit", not because, because)]
    )


ALONE = [said(1, step) for step in range(5)]
BEFORE = [said(1, 0), said(1, 1), said(1, 2)]


def test_the_same_digests_at_the_same_steps_are_identical() -> None:
    found = verdict()
    proof.compare(ALONE, [*BEFORE, said(2, 2), said(2, 3), said(2, 4)], found)
    assert found.identical and found.compared == 2 and found.names == 2
    assert list(proof_report.lines(found)) == [
        "Identical after 4 steps: 2 names compared at 2 steps after the resume"
    ]


def test_the_first_difference_is_named_with_both_values_and_what_is_probably_missing() -> None:
    found = verdict()
    wrong = {"model.weight": "x", "optimizer.groups.0.lr": "0.2"}
    proof.compare(
        ALONE,
        [*BEFORE, said(2, 2), said(2, 3, {"optimizer.groups.0.lr": "0.2"}), said(2, 4, wrong)],
        found,
    )
    assert not found.identical
    assert [(one.step, one.name, one.undisturbed, one.resumed) for one in found.differences] == [
        (3, "optimizer.groups.0.lr", "0.1", "0.2")
    ]
    lines = list(proof_report.lines(found))
    assert lines[0] == "DIFFERENT from step 3 on:"
    assert lines[1] == "  optimizer.groups.0.lr is 0.2; without the preemption it is 0.1"
    assert (
        lines[2].startswith("Probably missing: a learning-rate scheduler")
        and "protect(..., scheduler=scheduler)" in lines[2]
    )
    assert proof_report.to_json(found)["differences"][0]["name"] == "optimizer.groups.0.lr"


def test_what_lastcall_warned_of_is_the_cause() -> None:
    found = verdict("`best` was not handed over")
    proof.compare(ALONE, [*BEFORE, said(2, 2), said(2, 3, {"model.weight": "x"})], found)
    assert found.cause == "lastcall warned: `best` was not handed over"


def test_a_command_that_does_not_repeat_itself_proves_nothing() -> None:
    with pytest.raises(
        Exception,
        match=r"is not deterministic: at step 1, before any preemption, "
        r"model.weight is x and was w1",
    ):
        proof.compare(
            ALONE, [said(1, 0), said(1, 1, {"model.weight": "x"}), said(2, 1), said(2, 2)], verdict()
        )


def test_a_command_that_begins_from_what_the_first_run_has_left_is_told_how_to_prove_it() -> None:
    """minGPT-ddp and the DDP tutorial go on from a snapshot of their own: seeds would not help."""
    with pytest.raises(
        Exception,
        match=r"at step 0, .* remove that file each time: -- sh -c 'rm -f FILE; "
        r"exec COMMAND'",
    ):
        proof.compare(ALONE, [said(1, 0, {"model.weight": "x"}), said(1, 1)], verdict())


def test_generators_and_reports_that_differ_from_run_to_run_are_left_out_and_named() -> None:
    alone = [said(1, step, {"run.randomness.numpy.key": "a", "report.seconds": "1"}) for step in range(5)]
    other = {"run.randomness.numpy.key": "b", "report.seconds": "2"}
    found = verdict()
    proof.compare(alone, [said(1, 1, other), said(1, 2, other), said(2, 2, other), said(2, 3, other)], found)
    assert found.identical and found.uncertain == ["report.seconds", "run.randomness.numpy.key"]
    assert "Not compared, since it differs from run to run: report.seconds, run.randomness.numpy.key" in list(
        proof_report.lines(found)
    )


def test_a_report_that_has_not_come_yet_after_the_resume_is_no_difference() -> None:
    alone = [said(1, step, {"report.loss": "1"}) for step in range(5)]
    found = verdict()
    proof.compare(alone, [said(1, 1, {"report.loss": "1"}), said(2, 2), said(2, 3)], found)
    assert found.identical


def test_nothing_in_common_proves_nothing() -> None:
    with pytest.raises(Exception, match="they share no step"):
        proof.compare(ALONE, [*BEFORE, said(2, 7)], verdict())


def test_a_piece_of_state_that_is_gone_after_the_resume_is_a_difference() -> None:
    found = verdict()
    proof.compare(
        [said(1, step, {"ema.weight": "e"}) for step in range(5)],
        [said(2, 2, {"ema.weight": "e"}), said(2, 3)],
        found,
    )
    assert [(one.name, one.resumed) for one in found.differences] == [("ema.weight", None)]
    assert "ema.weight is missing" in list(proof_report.lines(found))[1]


def test_identical_steps_behind_a_checkpoint_that_is_not_exact_prove_nothing() -> None:
    found = verdict("`best` was not handed over")
    proof.compare(ALONE, [*BEFORE, said(2, 2), said(2, 3)], found)
    assert found.identical and not found.proved
    assert list(proof_report.lines(found)) == [
        "NOT PROVED, although identical up to now, after 4 steps: 2 names compared at 1 step after the "
        "resume",
        "checkpoint-2 is marked as not exact (`best` was not handed over): a difference may show in later "
        "steps",
    ]
    assert proof_report.to_json(found)["identical"] and not proof_report.to_json(found)["proved"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optimizer.groups.1.lr", "scheduler"),
        ("run.randomness.torch", "random numbers"),
        ("model.0.weight", "a batch that was fetched before the step ended"),
        ("report.loss", "but its reports are not"),
    ],
)
def test_causes(name: str, words: str) -> None:
    assert words in causes.probable([name])
