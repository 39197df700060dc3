"""Machines that share no directory: each has its own, which may go with it, and the checkpoints are in a
mirror."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from helpers.core.bare_core import flip
from helpers.core.mirrors import copies
from helpers.ranks import cuts
from helpers.ranks import jobs as ranks_jobs
from helpers.ranks import trials as ranks_trials
from helpers.ranks.cuts import CONFIGURED, GRACE, MARGIN, Cut
from helpers.ranks.hosts import Hosts
from helpers.ranks.jobs import Job, Launched, Launcher
from helpers.ranks.plan import Plan
from helpers.ranks.trials import References, Strike
from helpers.servers import ports
from helpers.servers.s3 import Server

PLAN = Plan(steps=24, seconds=0.02)
SEED = int(os.environ.get("LASTCALL_TEST_SEED", "1"))
TRIALS = int(os.environ.get("LASTCALL_TEST_TRIALS", "1"))


def lost(machines: Sequence[Path]) -> None:
    for machine in machines:
        shutil.rmtree(machine, ignore_errors=True)


@contextlib.contextmanager
def out_of_reach(mirror: Path) -> Iterator[None]:
    aside = mirror.with_name("aside")
    mirror.rename(aside)
    mirror.write_text("no folder any more")
    yield
    mirror.unlink()
    aside.rename(mirror)


def launched(
    launcher: Launcher,
    machines: Sequence[Path],
    plan: Plan,
    *options: str,
    before: Sequence[str] = (),
    **env: str,
) -> Launched:
    """A real torchrun for each machine."""
    port = ports.free_port()
    script = str(ranks_jobs.SCRIPTS / "ddp.py")
    where = ["--nnodes", str(len(machines)), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    commands = [
        [*before, *ranks_jobs.torchrun(1, *where, "--node-rank", str(number), *options), script, str(machine)]
        for number, machine in enumerate(machines)
    ]
    return launcher.launch_all(commands, len(machines), plan, **env)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_below_lastcall_run_both_machines_are_told_and_come_back_elsewhere(
    launcher: Launcher, references: References, machines: list[Path], mirror: Path
) -> None:
    first = launched(launcher, machines, PLAN, before=ranks_jobs.LASTCALL_RUN, **copies(mirror))
    assert first.until(1, "at", 6), first.log()
    for launcher_ in first.launchers:
        launcher_.send_signal(signal.SIGTERM)
    assert set(first.wait().values()) == {ranks_trials.SAVED}, first.log()
    (record,) = ranks_trials.records(mirror)
    assert record["world"] == 2 and record["exact"], first.log()
    lost(machines)
    second = launched(launcher, machines, PLAN, before=ranks_jobs.LASTCALL_RUN, **copies(mirror))
    assert set(second.wait().values()) == {0}, second.log()
    assert ranks_trials.reference(second.journals()).final == references.of("ddp.py", 2, PLAN).final


@pytest.mark.timeout(240)
def test_two_machines_below_torchrun_lose_their_directories_and_not_a_single_step(
    launcher: Launcher, references: References, server: Server, machines: list[Path]
) -> None:
    env = {"LASTCALL_MIRROR": "s3://runs/exp1", **server.environment}
    bucket = server.folder / "runs" / "exp1"
    first = launched(launcher, machines, PLAN, **env)
    assert first.until(1, "at", 6), first.log()
    first.send(1, signal.SIGTERM)
    first.wait()
    (record,) = ranks_trials.records(bucket)
    assert record["world"] == 2 and record["kind"] == "jit" and record["exact"], first.log()
    assert "is local to this machine" in first.log()
    lost(machines)
    second = launched(launcher, machines, PLAN, **env)
    assert set(second.wait().values()) == {0}, second.log()
    assert second.log().count(f"Fetched checkpoint-{record['step']}") == 2
    assert ranks_trials.reference(second.journals()).final == references.of("ddp.py", 2, PLAN).final
    assert [found["step"] for found in ranks_trials.records(bucket)] == [record["step"], 24]


def survive(
    launcher: Launcher,
    references: References,
    machines: list[Path],
    mirror: Path,
    start: Callable[[], Job],
    ranks: int,
    script: str,
) -> None:
    """A random notice, then lives until the end; before each some machines may have lost all that they
    had."""
    dice = random.Random(repr((SEED, launcher.folder.name, script)))

    def begin() -> Job:
        lost([machine for machine in machines if dice.random() < 0.5])
        return start()

    for _ in range(TRIALS):
        lost(machines)
        shutil.rmtree(mirror, ignore_errors=True)
        strikes = [[ranks_trials.random_strike(dice, ranks, PLAN, early=False)] for _ in range(2)]
        trial = ranks_trials.until_finished(begin, mirror, strikes)
        ranks_trials.check(trial, references.of(script, ranks, PLAN))
        ranks_trials.check_heard(trial, PLAN.steps)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "ranks", "how"),
    [
        ("ddp.py", 2, "alone"),
        ("ddp.py", 4, "agent"),
        ("fsdp.py", 2, "agent"),
        pytest.param("fsdp.py", 4, "alone", marks=pytest.mark.slow),
    ],
)
def test_notices_at_any_moment_cost_nothing(
    launcher: Launcher,
    references: References,
    machines: list[Path],
    mirror: Path,
    script: str,
    ranks: int,
    how: str,
) -> None:
    def start() -> Job:
        return launcher.fork(script, ranks, how, machines, PLAN, **copies(mirror))

    survive(launcher, references, machines, mirror, start, ranks, script)


@pytest.mark.timeout(300)
def test_ranks_killed_at_any_moment_tear_nothing_and_hang_nobody(
    launcher: Launcher, references: References, tmp_path: Path, mirror: Path
) -> None:
    """With periodic saves under way, some machines new in the next life, and the first step of a start as
    good a moment as any."""
    dice = random.Random(repr((SEED, "kill")))
    for number in range(TRIALS):
        machines = [tmp_path / f"{number}-{machine}" / "run" for machine in range(2)]
        ranks, how = dice.choice([2, 4]), dice.choice(["agent", "alone"])
        mirror.mkdir(exist_ok=True)
        env = {**copies(mirror / str(number)), "LASTCALL_SAVE_STRATEGY": "steps", "LASTCALL_SAVE_STEPS": "5"}
        strikes = [ranks_trials.random_strike(dice, ranks, PLAN, early=True) for _ in range(2)]
        kills = [
            dataclasses.replace(strike, signum=signal.SIGKILL, hits=strike.hits[:1]) for strike in strikes
        ]
        trial = ranks_trials.Trial()
        while not trial.lives or trial.lives[-1].outcome != "finished":
            assert len(trial.lives) < 6, trial.story()
            lost([machine for machine in machines if dice.random() < 0.3])
            job = launcher.fork("ddp.py", ranks, how, machines, PLAN, **env, LASTCALL_GRACE_SECONDS="8")
            trial.lives.append(ranks_trials.live(job, mirror / str(number), [kills.pop()] if kills else ()))
        assert not any("Internal error in lastcall" in life.log for life in trial.lives), trial.story()
        if all(record["exact"] for life in trial.lives for record in life.committed):
            ranks_trials.check_end(trial.lives[-1], references.of("ddp.py", ranks, PLAN), trial.story)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_survivor_of_another_machine_saves_in_its_own_directory(
    launcher: Launcher, references: References, machines: list[Path], mirror: Path, victim: int
) -> None:
    strike = Strike(victim, "at", 8, 0.0, ((victim, 0.0),), signal.SIGKILL)

    def start() -> Job:
        return launcher.fork("ddp.py", 2, "agent", machines, PLAN, **copies(mirror))

    def begin() -> Job:
        lost(machines)
        return start()

    trial = ranks_trials.until_finished(begin, mirror, [[strike]])
    ranks_trials.check(trial, references.of("ddp.py", 2, PLAN), most_lost=1)
    assert trial.lives[0].committed, trial.story()


def test_what_was_not_copied_in_time_comes_from_the_first_machine(
    launcher: Launcher, references: References, machines: list[Path], mirror: Path
) -> None:
    """Its directory is still there: the processes are started again, and not the machines."""
    env = copies(mirror)
    first = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env, LASTCALL_GRACE_SECONDS="4")
    assert first.until(0, "at", 6), first.log()
    with out_of_reach(mirror):
        first.send(0, signal.SIGTERM)
        first.wait()
    (record,) = ranks_trials.records(machines[0])
    assert "The newest checkpoint is only in" in first.log(), first.log()
    second = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
    assert set(second.wait().values()) == {0}, second.log()
    fetched = f"Fetching checkpoint-{record['step']} from rank 0" in second.log()
    # rank 0 may have copied it before the other asked
    copied_first = f"Fetched checkpoint-{record['step']}" in second.log()
    assert fetched or copied_first, second.log()
    assert ranks_trials.reference(second.journals()).final == references.of("ddp.py", 2, PLAN).final


def test_what_the_survivors_have_saved_elsewhere_is_found_though_it_was_never_copied(
    launcher: Launcher, references: References, machines: list[Path], mirror: Path
) -> None:
    first = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **copies(mirror), LASTCALL_GRACE_SECONDS="4")
    assert first.until(0, "at", 8), first.log()
    with out_of_reach(mirror):
        first.send(0, signal.SIGKILL)
        first.wait()
    (record,) = ranks_trials.records(machines[1])
    assert record["kind"] == "survivors" and not ranks_trials.records(machines[0]), first.log()
    second = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **copies(mirror))
    assert set(second.wait().values()) == {0}, second.log()
    assert f"Fetching checkpoint-{record['step']} from rank 1" in second.log()
    assert f"Resuming from checkpoint-{record['step']}" in second.log()
    if record["exact"]:
        assert ranks_trials.reference(second.journals()).final == references.of("ddp.py", 2, PLAN).final


def test_a_damaged_copy_of_another_machine_is_fetched_again(
    launcher: Launcher, references: References, machines: list[Path], mirror: Path
) -> None:
    env = copies(mirror)
    for _ in range(2):  # the second life fetches the first one's to the second machine
        job = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
        assert job.until(0, "at", 3), job.log()
        time.sleep(0.1)
        job.send(0, signal.SIGTERM)
        job.wait()
    newest = ranks_trials.records(machines[0])[-1]
    third = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
    assert third.until(0, "protected"), third.log()
    third.end()
    flip(machines[1] / f"checkpoint-{newest['step']}" / newest["files"][-1]["name"], 5)
    last = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
    assert set(last.wait().values()) == {0}, last.log()
    assert (
        f"set checkpoint-{newest['step']} aside" in last.log()
        and f"Fetched checkpoint-{newest['step']}" in last.log()
    )
    assert f"checkpoint-{newest['step']}.damaged-0" not in os.listdir(machines[0])
    assert ranks_trials.reference(last.journals()).final == references.of("ddp.py", 2, PLAN).final


def test_without_a_mirror_directories_of_their_own_are_refused(
    launcher: Launcher, machines: list[Path]
) -> None:
    job = launcher.fork("ddp.py", 2, "agent", machines, PLAN)
    assert 0 not in job.wait().values()
    assert "LASTCALL_MIRROR=s3://BUCKET/PREFIX" in job.log() and "LASTCALL_RANKS=separate" in job.log(), (
        job.log()
    )
    assert not any(job.said(rank, "protected") for rank in range(2))


# ---- hosts with addresses of their own ---------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["alone", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_link_that_is_cut_while_a_part_is_sent_hangs_nobody_and_tears_nothing(
    launcher: Launcher, references: References, hosts: Hosts, machines: list[Path], mirror: Path, how: str
) -> None:
    plan, dice = dataclasses.replace(PLAN, disk_seconds=0.1), random.Random(repr((SEED, how)))

    def start() -> Job:
        hosts.mend(0)
        hosts.mend(1)
        return launcher.fork("ddp.py", 2, how, machines, plan, hosts, **CONFIGURED, **copies(mirror))

    for host in range(2):
        lost([*machines, mirror])
        notice = Strike(0, "at", 6, 0.0, ((0, 0.0), (1, 0.0)))
        cut = Cut(hosts, machines[1], notice, host, dice.uniform(0.0, 0.4), in_save=True)
        trial = ranks_trials.until_finished(start, mirror, [[cut]], limit=GRACE + MARGIN)
        assert len(trial.lives) > 1, f"the notice had no effect\n{trial.story()}"
        cuts.check(trial, references.of("ddp.py", 2, plan))


def test_ranks_of_two_hosts_save_together_and_go_on(
    launcher: Launcher, references: References, hosts: Hosts, machines: list[Path], mirror: Path
) -> None:
    """Ranks of two hosts save together, and what is on one of them is brought to the other."""
    first = launcher.fork("fsdp.py", 4, "alone", machines, PLAN, hosts, **CONFIGURED, **copies(mirror))
    assert first.until(0, "at", 6), first.log()
    first.send(3, signal.SIGTERM)
    first.wait()
    (record,) = ranks_trials.records(mirror)
    assert record["world"] == 4 and record["exact"], first.log()
    lost(machines[1:])
    second = launcher.fork("fsdp.py", 4, "alone", machines, PLAN, hosts, **CONFIGURED, **copies(mirror))
    assert set(second.wait().values()) == {0}, second.log()
    assert ranks_trials.reference(second.journals()).final == references.of("fsdp.py", 4, PLAN).final
