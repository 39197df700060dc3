"""The exit code, as a table."""

from __future__ import annotations

import dataclasses

import pytest

from lastcall.core.process.registry import Member
from lastcall.launch import outcome
from lastcall.launch.outcome import Result
from lastcall.launch.supervisor import Ending
from lastcall.types import Notice

CODE = 85  # what this platform wants of a saved run
TERM = Notice("signal", "SIGTERM", 0.0, 30.0, 15)
CLOUD = Notice("aws", "terminate", 0.0, 120.0)


def member(said: str | None, pid: int = 10, root: str = "/runs/a") -> Member:
    return Member(pid, 1, root, 7, outcome=said, checkpoint="checkpoint-7" if said == "saved" else None)


STAYS = dataclasses.replace(member("saved"), stays="the script never calls load_state()")


def ending(status: int, *members: Member, notice: Notice | None = None, **more: object) -> Ending:
    return dataclasses.replace(Ending(1, status, members, notice), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "result", "code"),
    [
        # a command that does not train
        (ending(0), Result.ENDED, 0),
        (ending(3), Result.FAILED, 3),
        (ending(-9), Result.FAILED, 137),
        (ending(-15, notice=TERM), Result.STOPPED, 143),
        (ending(0, notice=TERM), Result.STOPPED, 143),  # B11: nobody has answered
        (ending(0, notice=CLOUD), Result.STOPPED, 143),
        (ending(1, notice=TERM, agents=True), Result.STOPPED, 143),  # torchrun's word for everything
        (ending(0, notice=TERM, elsewhere=True), Result.ENDED, 0),
        (ending(0, left={10: 0}), Result.ENDED, 0),  # H3: left behind, waited for, and never joined
        (ending(0, left={10: 1}), Result.FAILED, 1),
        (ending(0, left={10: -9}), Result.FAILED, 137),
        (ending(0, member("left")), Result.ENDED, 0),  # F5: sys.exit() in the loop
        (ending(4, notice=TERM), Result.STOPPED, 4),
        (ending(4, interrupted=True), Result.STOPPED, 4),
        (ending(0, interrupted=True), Result.ENDED, 0),
        (ending(-2), Result.STOPPED, 130),
        (ending(130), Result.STOPPED, 130),
        (ending(78), Result.STOPPED, 78),
        # saved: whatever stands in between says
        (ending(75, member("saved"), notice=TERM), Result.SAVED, CODE),
        (ending(0, member("saved"), notice=TERM), Result.SAVED, CODE),
        (ending(1, member("saved"), notice=CLOUD), Result.SAVED, CODE),
        (ending(-9, member("saved"), notice=TERM), Result.SAVED, CODE),
        (ending(75, member("saved")), Result.SAVED, CODE),  # the notice went to the training process alone
        (ending(143, STAYS, notice=TERM), Result.STOPPED, 143),  # B3: the same command would begin anew
        (ending(1, STAYS), Result.STOPPED, 143),
        (ending(143, STAYS, interrupted=True), Result.STOPPED, 130),
        (ending(75, member("saved"), interrupted=True), Result.STOPPED, 130),
        (ending(0, member("saved"), interrupted=True), Result.STOPPED, 130),
        # not saved
        (ending(-15, member("not saved"), notice=TERM), Result.STOPPED, 143),
        (ending(0, member("not saved"), notice=TERM), Result.STOPPED, 143),
        (ending(1, member("not saved"), notice=CLOUD), Result.STOPPED, 1),
        (ending(-15, member("not saved")), Result.STOPPED, 143),
        (ending(138, member("not saved")), Result.STOPPED, 138),
        (ending(0, member("not saved")), Result.STOPPED, 143),
        (ending(-9, member(None), notice=TERM), Result.STOPPED, 143),  # killed while it saved
        # finished
        (ending(0, member("finished")), Result.ENDED, 0),
        (ending(0, member("finished"), notice=TERM), Result.ENDED, 0),
        (ending(5, member("finished")), Result.FAILED, 5),
        # all is committed: what follows training is done again
        (ending(-15, member("finished"), notice=TERM), Result.SAVED, CODE),
        # failed
        (ending(9, member("failed")), Result.FAILED, 9),
        (ending(-11, member(None, pid=1)), Result.FAILED, 139),
        (ending(0, member("failed")), Result.FAILED, 1),
        (ending(0, member("failed"), statuses={10: 9}), Result.FAILED, 9),
        (ending(0, member(None), statuses={10: -9}), Result.FAILED, 137),
        # sys.exit(0) inside the block, and nobody in between
        (ending(0, member("failed", pid=1)), Result.ENDED, 0),
        (ending(1, member("failed"), interrupted=True), Result.STOPPED, 130),
        (ending(1, member("failed"), notice=TERM), Result.STOPPED, 1),
        (ending(78, member("failed")), Result.STOPPED, 78),
        # several: ranks of one run, or runs after one another
        (ending(1, member("saved"), member(None, 11), notice=TERM), Result.SAVED, CODE),
        (ending(1, member("saved"), member("not saved", 11), notice=TERM), Result.SAVED, CODE),
        (ending(1, member("saved"), member("not saved", 11, "/runs/b"), notice=TERM), Result.STOPPED, 143),
        (ending(1, member("saved"), member("finished", 11, "/runs/b"), notice=TERM), Result.SAVED, CODE),
        (ending(1, member("saved"), member("failed", 11, "/runs/b"), notice=TERM), Result.SAVED, CODE),
        (ending(0, member("failed"), member("finished", 11)), Result.ENDED, 0),
    ],
)
def test_the_exit_code_says_what_happened(case: Ending, result: Result, code: int) -> None:
    verdict = outcome.decide(case, CODE)
    assert (verdict.result, verdict.code) == (result, code)
    assert verdict.because


def test_what_the_guardian_saved_counts_as_saved() -> None:
    verdict = outcome.decide(ending(-9, member(None, pid=1)), CODE, ["a/checkpoint-6"])
    assert (verdict.result, verdict.code, verdict.crashed) == (Result.SAVED, CODE, True)
    assert "the guardian saved a/checkpoint-6 (command: SIGKILL)" in verdict.because


def test_a_rescue_after_a_notice_is_no_crash() -> None:
    assert not outcome.decide(ending(1, member(None), notice=TERM), CODE, ["a/checkpoint-6"]).crashed


def test_the_reason_names_the_checkpoint() -> None:
    assert "a/checkpoint-7" in outcome.decide(ending(1, member("saved"), notice=TERM), CODE).because
