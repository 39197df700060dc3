"""Hosts with addresses of their own, and a link that is cut: nobody hangs longer than configured, and nothing
is committed twice."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from pathlib import Path

import pytest

from helpers.processes.forkserver import Nursery
from helpers.ranks import cuts
from helpers.ranks import jobs as ranks_jobs
from helpers.ranks import trials as ranks_trials
from helpers.ranks.cuts import CONFIGURED, GRACE, MARGIN, Cut
from helpers.ranks.hosts import Hosts
from helpers.ranks.jobs import Job, Launched, Launcher
from helpers.ranks.plan import Plan
from helpers.ranks.trials import Life, References, Strike

PLAN = Plan(steps=24, seconds=0.02)
SEED = int(os.environ.get("LASTCALL_TEST_SEED", "1"))
TRIALS = int(os.environ.get("LASTCALL_TEST_TRIALS", "2"))


def started(
    launcher: Launcher, hosts: Hosts, directory: Path, plan: Plan, *before: str, **env: str
) -> Launched:
    """Real processes: a torchrun with one rank on each host."""
    script = [str(ranks_jobs.SCRIPTS / "ddp.py"), str(directory)]
    commands = [
        hosts.command(host, [*before, *hosts.torchrun(host, 1, *script)]) for host in range(hosts.count)
    ]
    return launcher.launch_all(
        commands, hosts.count, plan, **{"GLOO_SOCKET_IFNAME": "eth0", **CONFIGURED, **env}
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hosts_train_together_and_feel_a_cut_link(
    launcher: Launcher, hosts: Hosts, references: References
) -> None:
    """Without lastcall. Otherwise the tests below would test nothing: both ranks stand still until the link
    is mended."""
    job = started(launcher, hosts, launcher.folder / "run", PLAN, LASTCALL_ENABLED="0")
    assert job.until(0, "at", 5), job.log()
    hosts.cut(1)
    time.sleep(0.5)
    before = [len(job.journal(rank)) for rank in range(2)]
    time.sleep(0.5)
    assert [len(job.journal(rank)) for rank in range(2)] == before
    hosts.mend(1)
    life = ranks_trials.live(job, launcher.folder / "run")
    assert set(life.codes.values()) == {0}, life.log
    ranks_trials.check_end(life, references.of("ddp.py", 2, PLAN), lambda: life.log)


@pytest.mark.parametrize("how", ["alone", pytest.param("agent", marks=pytest.mark.slow)])
def test_forked_ranks_are_on_different_hosts(
    launcher: Launcher, hosts: Hosts, references: References, how: str
) -> None:
    """And make the same run there, without lastcall, as everywhere."""
    job = launcher.fork("ddp.py", 4, how, launcher.folder / "run", PLAN, hosts, LASTCALL_ENABLED="0")
    assert job.until(0, "at", 5), job.log()
    networks_seen = {os.readlink(f"/proc/{job.pid(rank)}/ns/net") for rank in range(4)}
    assert len(networks_seen) == 2
    assert os.readlink("/proc/self/ns/net") not in networks_seen
    life = ranks_trials.live(job, launcher.folder / "run")
    assert life.outcome == "finished", life.log
    ranks_trials.check_end(life, references.of("ddp.py", 4, PLAN), lambda: life.log)


def cut_once(
    launcher: Launcher, hosts: Hosts, references: References, dice: random.Random, in_save: bool
) -> None:
    """A cut of a random link, and lives until the run has finished: the links are whole when each begins."""
    directory, ranks, how = launcher.folder / "run", dice.choice([2, 4]), dice.choice(["alone", "agent"])
    plan = dataclasses.replace(PLAN, disk_seconds=0.2 if in_save else 0.0)
    targets = dice.sample(range(ranks), dice.randint(1, ranks))
    strike = Strike(0, "at", dice.randint(1, 12), 0.0, tuple((rank, 0.0) for rank in targets))
    cut = Cut(
        hosts,
        directory,
        strike,
        dice.randrange(2),
        dice.uniform(0.0, 0.3),
        in_save,
        dice.choice([None, None, 2.0]),
    )

    def start() -> Job:
        hosts.mend(0)
        hosts.mend(1)
        return launcher.fork(
            "ddp.py", ranks, how, directory, plan, hosts, LASTCALL_KILL_WAIT_SECONDS="0.2", **CONFIGURED
        )

    trial = ranks_trials.until_finished(start, directory, [[cut]], limit=GRACE + MARGIN)
    assert len(trial.lives) > 1, f"the notice had no effect\n{trial.story()}"
    cuts.check(trial, references.of("ddp.py", ranks, plan))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "in_save", [pytest.param(False, marks=pytest.mark.slow), True], ids=["protocol", "save"]
)
def test_a_link_that_is_cut_splits_nothing_and_hangs_nobody(
    distributed: Nursery, hosts: Hosts, references: References, tmp_path: Path, in_save: bool
) -> None:
    for seed in range(SEED, SEED + TRIALS):
        (tmp_path / str(seed)).mkdir()
        try:
            cut_once(
                Launcher(distributed, tmp_path / str(seed)),
                hosts,
                references,
                random.Random(f"{seed} {in_save}"),
                in_save,
            )
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            distributed.clear()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_launchers_survive_a_cut_link(launcher: Launcher, hosts: Hosts, references: References) -> None:
    """`lastcall run -- torchrun` on both hosts, each with a store of its own. torchrun may wait longer: that
    is not ours."""
    directory = launcher.folder / "run"
    job = started(launcher, hosts, directory, PLAN, *ranks_jobs.LASTCALL_RUN)
    Cut(hosts, directory, Strike(1, "at", 6, hits=((1, 0.0),)), host=1, delay=0.05).land(job)
    job.until_true(lambda: not job.alive(), "the end of all ranks", GRACE + MARGIN)
    first = Life({-1: 1}, (), job.journals(), ranks_trials.records(directory), job.log())
    job.end()
    hosts.mend(1)
    again = ranks_trials.live(started(launcher, hosts, directory, PLAN, *ranks_jobs.LASTCALL_RUN), directory)
    assert set(again.codes.values()) == {0}, again.log
    ranks_trials.check(ranks_trials.Trial([first, again]), references.of("ddp.py", 2, PLAN), most_lost=1)
