"""Every finding about Transformers' own just-in-time callback (and OpenShift AI's), played with theirs and
with ours: theirs fails in the way that was found, ours has nothing to complain of. The table is printed at
the end. `make test-slow` plays theirs in full.

Theirs is favoured: its kill wait of 3 s, which cannot be set, is as short here as ours.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

import pytest

from helpers.trainer.jobs import KILLED, SAVED, Play, Stage, Strike
from helpers.trainer.plan import Plan

FAILS, PASSES, VARIES = "fails", "passes", "varies"


@dataclass(frozen=True)
class Finding:
    name: str
    says: str
    play: Play
    about: tuple[str, ...]  # the kinds of complaint, any of which is the finding
    # what their column does; where both do the right thing, or chance decides, it is only written down
    theirs: str = FAILS
    slow: bool = False  # theirs takes long, and is left to `make test-slow`
    more: bool = False  # one more trial: ours is left to it as well


TERM, KILL = signal.SIGTERM, signal.SIGKILL
PEERS_LUCK = 2  # a race that theirs has won on a busy machine is run so many times more; ours never is
PLAIN = Play(Plan(), on_save=True)
PERIODIC = Plan(save="steps", save_steps=6, seconds=0.1)  # none falls into the kill wait
SLOW_DISK = replace(PERIODIC, save_seconds=0.8)
EPOCHS = Plan(save="epoch", samples=24, save_seconds=0.3)  # 12 steps an epoch
LONG_EVALUATION = Plan(evaluate="steps", eval_batches=24, eval_seconds=0.25)
BOTH = (0, 1)
APART = ("hang", "crash", "resume")  # what becomes of ranks that do not agree
PAIR = Play(Plan(seconds=0.1), ranks=2, patience=12.0)

ONE_PROCESS = [
    Finding(
        "A0",
        "the first launch of a script that also serves restarts",
        Play(Plan(steps=4), (), always=True),
        ("start",),
    ),
    Finding("A1", "SIGTERM, one process", PLAIN, ("code", "tail")),
    Finding(
        "A3/R13",
        "SIGTERM in a long evaluation",
        Play(LONG_EVALUATION, (Strike("evaluating", 4),), within=4.0),
        ("late",),
        slow=True,
    ),
    Finding(
        "A4a",
        "between Trainer() and train()",
        Play(Plan(make_seconds=1.0), (Strike("made", -1),), codes=(SAVED, KILLED), within=15.0),
        ("code", "tail"),
        slow=True,
    ),
    Finding(
        "A4b",
        "before Trainer()",
        Play(Plan(import_seconds=1.0), (Strike("importing", -1),), codes=(SAVED, KILLED)),
        ("resume",),
        PASSES,
    ),
    Finding("A5", "during a periodic save", Play(SLOW_DISK, (Strike("saving", 6),)), ("saves",)),
    Finding(
        "A6a", "two SIGTERMs", Play(Plan(), (Strike(times=2, apart=0.1),)), ("saves",), VARIES, slow=True
    ),
    Finding(
        "A6b",
        "a second SIGTERM during the save",
        Play(replace(SLOW_DISK, save="no"), (Strike(), Strike("saving", 0))),
        ("saves",),
        slow=True,
    ),
    Finding(
        "A7",
        "save_strategy and eval_strategy epoch",
        Play(replace(EPOCHS, evaluate="epoch"), (Strike("did", 3),)),
        ("saves", "evaluation"),
        slow=True,
    ),
    Finding("R1", "save_strategy epoch", Play(EPOCHS, (Strike("did", 3),)), ("saves",), slow=True),
    Finding(
        "R5b",
        "SIGKILL in the second save",
        Play(
            EPOCHS, (Strike("did", 3), Strike("saving", 0, nth=2, after=0.1, signum=KILL)), all_struck=False
        ),
        ("resume",),
        slow=True,
    ),
    Finding(
        "A8b",
        "load_best_model_at_end, save_total_limit 1, the best is old",
        Play(replace(PERIODIC, evaluate="steps", best=6, limit=1), (Strike("did", 7),)),
        ("lost",),
    ),
    Finding(
        "A9b/R3",
        "SIGKILL in a periodic save",
        Play(SLOW_DISK, (Strike("saving", 0, nth=2, after=0.2, signum=KILL),), codes=(-KILL,), lost=99),
        ("resume",),
    ),
    Finding(
        "A9c",
        "SIGKILL in the just-in-time save",
        Play(
            Plan(save="steps", save_steps=8, seconds=0.15, save_seconds=0.6),
            (Strike("did", 13), Strike("saving", 13, after=0.2, signum=KILL)),
            codes=(-KILL,),
            lost=99,
        ),
        ("resume",),
        slow=True,
    ),
    Finding("A10", "the Trainer in a thread", Play(Plan(thread=True)), ("start",)),
    Finding(
        "A11",
        "a second train()",
        Play(Plan(first=3), (Strike("again", -1, after=0.5),), resumed=False),
        ("lost",),
    ),
    Finding("A12", "the user's on_save callback", PLAIN, ("on_save",)),
    Finding(
        "A13b",
        "SIGTERM to the process group, DataLoader workers",
        Play(Plan(workers=2), (Strike(group=True),)),
        ("lost",),
    ),
    Finding(
        "A16",
        "a long step",
        Play(Plan(seconds=1.2, steps=6), (Strike("training", 2, after=0.1),)),
        ("lost", "exact"),
        slow=True,
    ),
    Finding(
        "A17",
        "a long accumulation window",
        Play(Plan(steps=6, accumulate=6, seconds=0.2), (Strike("micro", 2, after=0.1),)),
        ("lost", "exact"),
        slow=True,
    ),
    Finding("A.3", "bit-exact: dropout", PLAIN, ("exact",)),
    Finding(
        "A.3 accumulation",
        "bit-exact: dropout, accumulation 4",
        Play(Plan(steps=12, accumulate=4)),
        ("exact",),
        slow=True,
    ),
    Finding(
        "A.3 epoch",
        "bit-exact: dropout, second epoch",
        Play(Plan(samples=16), (Strike("did", 9),)),
        ("exact",),
        slow=True,
    ),
    Finding("R2b", "one write fails with EIO in the save", Play(Plan(eio=True)), ("resume", "lost")),
    Finding(
        "R9",
        "another run in the same folder",
        Play(Plan(), other=Plan(seed=2, rate=5e-4, steps=30)),
        ("foreign",),
    ),
    Finding(
        "R10",
        "SIGTERM after train() returned",
        Play(Plan(steps=4, tail_seconds=2.0), (Strike("tail", -1),), codes=(KILLED,), lost=99),
        ("tail",),
        PASSES,
    ),
    Finding(
        "REENT",
        "thirty SIGTERMs among log lines",
        Play(Plan(chatty=True), (Strike(times=30, apart=0.005),)),
        ("saves",),
        VARIES,
        slow=True,
    ),
]

TWO_RANKS = [
    Finding("D2", "rank 0 only", replace(PAIR, strikes=(Strike(ranks=(0,)),)), APART, slow=True),
    Finding("HD1", "rank 1 only", replace(PAIR, strikes=(Strike(ranks=(1,)),)), APART),
    Finding(
        "HD01",
        "rank 0, and 0.6 s later rank 1",
        replace(PAIR, strikes=(Strike(ranks=(0, 1), apart=0.6),)),
        APART,
        slow=True,
    ),
    Finding(
        "HD10",
        "rank 1, and 0.6 s later rank 0",
        replace(PAIR, strikes=(Strike(ranks=(1, 0), apart=0.6),)),
        APART,
        slow=True,
    ),
    *(
        Finding(
            f"D5 #{trial}",
            "both at once",
            Play(
                Plan(seconds=0.02, steps=40), (Strike("did", 5 + trial, ranks=BOTH),), ranks=2, patience=12.0
            ),
            APART,
            VARIES,
            slow=True,
            more=trial > 0,
        )
        for trial in range(8)
    ),
    Finding(
        "D6b",
        "SIGKILL while rank 0 writes and rank 1 has ended its part",
        Play(
            replace(SLOW_DISK, slow_rank=0, save_steps=12, steps=30),
            (Strike("did", 20, ranks=BOTH), Strike("saving", 20, after=0.4, signum=KILL, ranks=BOTH)),
            ranks=2,
            codes=(-KILL,),
            lost=99,
            patience=12.0,
        ),
        APART,
        VARIES,
        slow=True,
    ),
    Finding(
        "R8",
        "save_total_limit 1, rank 1 is killed in its part of the save",
        Play(
            replace(SLOW_DISK, slow_rank=1, limit=1, save_steps=12, steps=30),
            (
                Strike("did", 18, ranks=BOTH),
                Strike("saving", 18, after=0.2, signum=KILL, ranks=(1,), watched=1),
            ),
            ranks=2,
            codes=(-KILL, SAVED),
            saves=2,  # the second is the survivor's
            patience=12.0,
        ),
        ("exact", "lost", "resume"),
        VARIES,
        slow=True,
    ),
    Finding(
        "D1",
        "SIGTERM to torchrun",
        Play(Plan(seconds=0.1), (Strike(ranks=(-1,)),), ranks=2, how="torchrun"),
        ("exact", "lost", *APART),
        slow=True,
    ),
]
FINDINGS = [*ONE_PROCESS, *TWO_RANKS]


def cell(complaints: dict[str, str], about: tuple[str, ...]) -> str:
    own = [text for kind, text in complaints.items() if kind in about]
    return "; ".join(own) or (
        f"as it should ({', '.join(complaints)} apart)" if complaints else "as it should"
    )


def row(table: dict[str, dict[str, str]], finding: Finding) -> dict[str, str]:
    """Its row of the table, which has those of all findings in their order."""
    for each in FINDINGS:
        table.setdefault(f"{each.name}: {each.says}", {})
    return table[f"{finding.name}: {finding.says}"]


def played(finding: Finding, slow: bool) -> object:
    return pytest.param(finding, id=finding.name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("finding", [played(finding, finding.slow) for finding in FINDINGS])
def test_theirs_fails_as_was_found(stage: Stage, table: dict[str, dict[str, str]], finding: Finding) -> None:
    result = stage.result(finding.play, "hf")
    for _ in range(PEERS_LUCK):
        if finding.theirs == FAILS and not set(result.complaints) & set(finding.about):
            result = stage.result(finding.play, "hf", again=True)
    row(table, finding)["hf"] = cell(result.complaints, finding.about)
    if finding.theirs == FAILS:
        assert set(result.complaints) & set(finding.about), result.story()


@pytest.mark.parametrize("finding", [played(finding, finding.more) for finding in FINDINGS])
def test_ours_has_nothing_to_complain_of(
    stage: Stage, table: dict[str, dict[str, str]], finding: Finding
) -> None:
    result = stage.result(finding.play, "lastcall")
    row(table, finding)["lastcall"] = "; ".join(result.complaints.values()) or "as it should"
    assert not result.complaints, result.story()


def test_nothing_changed_in_the_script_nor_in_how_it_is_started_but_lastcall_run(stage: Stage) -> None:
    result = stage.result(
        Play(Plan(seconds=0.1), how="lastcall run", strikes=(Strike(ranks=(-1,)),)), "lastcall"
    )
    assert not result.complaints, result.story()
