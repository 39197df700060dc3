"""What counts as lost, and the reason that is given for it."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lastcall.drill import report
from lastcall.drill.evidence import CommittedCheckpoint, RecordedStart, Traces
from lastcall.drill.options import DrillOptions
from lastcall.drill.report import Back, DirectoryRound, DrillReport, DrillRound, Gone, RunEnd

RUN = Path("/runs/a")
OPTIONS = DrillOptions(("python", "train.py"), grace=30.0)
SAVED = CommittedCheckpoint("checkpoint-12", 12, "jit", True, "", True, 1000)
HEARD = Traces(
    noticed=100.01,
    believed=30.0,
    save_begins=103.0,
    save_step=12,
    committed=103.5,
    outcome="saved",
    stop_step=12,
)
GONE = Gone(sent=100.0, seconds=4.0, status=75)
BACK = Back(True, spoke=0.5, joined=2.0, first_step=3.0)
PART = DirectoryRound(
    RUN, 10, 12, False, HEARD, SAVED, True, resumed=SAVED, start=RecordedStart(106.0, "checkpoint-12", 0.2)
)


def judged(
    part: DirectoryRound = PART, gone: Gone = GONE, back: Back = BACK, options: DrillOptions = OPTIONS
) -> DrillRound:
    return report.judged(DrillRound(1, 2.0, gone, back, 4.1, (part,)), options)


def changed(part: DirectoryRound = PART, **traces: Any) -> DirectoryRound:
    """The part of a run that came back from the beginning, with other traces."""
    return dataclasses.replace(
        part, saved=None, resumed=None, traces=dataclasses.replace(part.traces, committed=None, **traces)
    )


def test_a_step_that_was_saved_after_the_notice_counts_as_reached_and_nothing_is_lost() -> None:
    part = report.part(RUN, 10, 13, 100.0, HEARD, (SAVED, 103.4))
    assert (part.step, part.reached, part.at_least, part.saved) == (10, 12, False, SAVED)
    assert part.lost is None
    assert dataclasses.replace(part, returned=True, resumed=SAVED).lost == 0


def test_a_checkpoint_from_before_the_notice_does_not_count_as_saved() -> None:
    part = report.part(RUN, 20, 21, 100.0, Traces(), (SAVED, 99.9))
    assert part.saved is None and part.reached == 21 and part.at_least
    assert dataclasses.replace(part, returned=True, resumed=SAVED).lost == 9


def test_the_steps_after_the_notice_are_lost_too_if_nothing_is_saved() -> None:
    part = report.part(RUN, 10, 11, 100.0, dataclasses.replace(HEARD, save_step=40, stop_step=41), None)
    assert (part.reached, part.at_least) == (41, False)
    assert dataclasses.replace(part, returned=True).lost == 41


def test_the_step_of_the_notice_event_is_more_exact_than_the_word_before_it() -> None:
    assert (
        report.part(RUN, 10, 10, 100.0, dataclasses.replace(HEARD, notice_step=11), (SAVED, 103.0)).step == 11
    )


def test_nothing_lost_is_a_success_without_words() -> None:
    assert judged().ok and judged().notes == () and judged().lost == 0


def test_the_phases_count_from_the_signal_and_then_from_the_new_start() -> None:
    seconds = judged().seconds
    assert seconds == {
        "waited": 2.0, "noticed": 0.01, "save_begins": 3.0, "committed": 3.5, "gone": 4.0,
        "first_output": 0.5, "resumed": 1.9, "restored_in": 0.2, "first_step": 3.0, "standstill": 4.1,
    }  # fmt: skip


def test_phases_that_nobody_saw_are_null() -> None:
    part = dataclasses.replace(PART, traces=Traces(), start=None)
    seconds = judged(part, back=Back(True, joined=2.0)).seconds
    assert [name for name, value in seconds.items() if value is None] == [
        "noticed", "save_begins", "committed", "first_output", "restored_in", "first_step", "standstill",
    ]  # fmt: skip
    assert seconds["resumed"] == 2.0


@pytest.mark.parametrize(
    ("part", "gone", "options", "said"),
    [
        (
            changed(),
            dataclasses.replace(GONE, killed=True),
            OPTIONS,
            "no checkpoint was committed in the grace of 30 s, and it was killed",
        ),
        (
            changed(noticed=None),
            dataclasses.replace(GONE, killed=True),
            OPTIONS,
            "the training never got the notice, and was killed",
        ),
        (
            changed(noticed=None),
            dataclasses.replace(GONE, orphans=(7, 8)),
            OPTIONS,
            "while the training (process 7, 8) got no notice",
        ),
        (changed(not_saved="no space left"), GONE, OPTIONS, "it could not save: no space left"),
        (
            changed(noticed=None),
            GONE,
            dataclasses.replace(OPTIONS, signum=signal.SIGKILL),
            "SIGKILL leaves no time to save",
        ),
        (
            changed(noticed=None),
            GONE,
            dataclasses.replace(OPTIONS, signum=signal.SIGUSR1),
            "Set LASTCALL_SIGNALS=SIGUSR1",
        ),
        (changed(), GONE, OPTIONS, "it ended with exit code 75 before a checkpoint was committed"),
        (
            dataclasses.replace(PART, saved=None, resumed=None),
            GONE,
            OPTIONS,
            "a checkpoint was committed, but is no longer in /runs/a",
        ),
        (
            dataclasses.replace(PART, resumed=None),
            GONE,
            OPTIONS,
            "checkpoint-12 was saved, but it resumed from scratch",
        ),
    ],
)
def test_every_loss_has_its_reason(
    part: DirectoryRound, gone: Gone, options: DrillOptions, said: str
) -> None:
    round = judged(part, gone, options=options)
    assert not round.ok and round.lost == 12
    assert round.reasons[0].startswith("12 steps lost: ") and said in round.reasons[0]


def test_a_loss_that_is_not_known_exactly_says_so() -> None:
    round = judged(dataclasses.replace(changed(), at_least=True))
    assert round.at_least and round.reasons[0].startswith("at least 12 steps lost")


def test_an_inexact_and_a_partial_checkpoint_are_no_success() -> None:
    inexact = dataclasses.replace(SAVED, exact=False, because="half a step")
    assert judged(dataclasses.replace(PART, resumed=inexact)).reasons == (
        "checkpoint-12, which it resumed from, is not exact: half a step",
    )
    partial = dataclasses.replace(inexact, complete=False, because="no time for optimizer.safetensors")
    assert "is partial: no time for" in judged(dataclasses.replace(PART, resumed=partial)).reasons[0]


def test_a_run_that_does_not_come_back_has_lost_nobody_knows_how_much() -> None:
    round = judged(dataclasses.replace(PART, returned=False, resumed=None), back=Back(False, "exit code 1"))
    assert round.lost is None and round.reasons == ("it did not resume: exit code 1",)


def test_a_run_in_two_directories_has_lost_what_the_worse_of_them_has() -> None:
    other = dataclasses.replace(changed(), directory=Path("/runs/b"))
    round = report.judged(DrillRound(1, 2.0, GONE, BACK, 4.1, (PART, other)), OPTIONS)
    assert round.lost == 12 and round.step == 10
    assert round.reasons[0].startswith("12 steps lost in /runs/b: ")


def test_a_run_that_overrates_its_grace_is_told_the_variable_to_set() -> None:
    round = judged(options=dataclasses.replace(OPTIONS, grace=10.0))
    assert round.notes == ("the run assumed a grace of 30 s, but it is 10 s. Set LASTCALL_GRACE_SECONDS=10",)
    assert round.ok


@pytest.mark.parametrize(
    ("status", "exit", "name"),
    [(75, 75, None), (-15, 143, "SIGTERM"), (-64, 192, "SIGRTMAX"), (-50, 178, "signal 50")],
)
def test_an_exit_is_told_as_a_shell_would(status: int, exit: int, name: str | None) -> None:
    gone = dataclasses.replace(GONE, status=status)
    assert (gone.exit, gone.died_of) == (exit, name)


def test_a_report_is_a_success_only_when_every_round_is_there() -> None:
    whole = DrillReport(OPTIONS, rounds=[judged()])
    assert whole.ok
    assert not DrillReport(dataclasses.replace(OPTIONS, times=2), rounds=[judged()]).ok
    assert not dataclasses.replace(whole, problem="it stands").ok
    assert not dataclasses.replace(whole, interrupted=signal.SIGINT).ok
    assert not DrillReport(OPTIONS, rounds=[judged(changed())]).ok


def test_the_json_is_what_the_documentation_lists() -> None:
    whole = DrillReport(OPTIONS, [RUN], [judged()], RunEnd("stopped", 75, True))
    body = json.loads(json.dumps(whole.to_json()))
    text = (Path(__file__).resolve().parents[3] / "docs" / "drill.md").read_text()

    def names(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(names, value.values()))
        return set().union(*map(names, value)) if isinstance(value, list) else set()

    assert [name for name in sorted(names(body)) if f"`{name}`" not in text] == []
    assert body["rounds"][0]["directories"][0]["saved"]["name"] == "checkpoint-12"
    assert (body["lost"], body["rounds"][0]["exact"], body["end"]["saved"]) == (0, True, True)
