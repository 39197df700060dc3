"""Machines that share no directory, started again: by torchrun itself, and as other machines than before."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.core.mirrors import copies
from helpers.ranks import jobs as ranks_jobs
from helpers.ranks import trials as ranks_trials
from helpers.ranks.jobs import Launched, Launcher
from helpers.ranks.plan import Fault, Plan
from helpers.ranks.trials import References
from helpers.servers import ports
from helpers.servers.s3 import Server

PLAN = Plan(steps=24, seconds=0.02)
slow = pytest.mark.slow


def restarting(launcher: Launcher, machines: Sequence[Path], plan: Plan, **env: str) -> Launched:
    """A real torchrun for each machine. They have one rendezvous, and start their workers again together."""
    endpoint = f"127.0.0.1:{ports.free_port()}"
    where = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        "run",
        "--local-addr",
        "127.0.0.1",
    ]
    options = ["--nnodes", str(len(machines)), "--max-restarts", "2", *where]
    script = str(ranks_jobs.SCRIPTS / "ddp.py")
    commands = [
        [
            *ranks_jobs.torchrun(
                1, *options, "--rdzv-conf", f"is_host={int(number == 0)},keep_alive_interval=1"
            ),
            script,
            str(machine),
        ]
        for number, machine in enumerate(machines)
    ]
    return launcher.launch_all(commands, len(machines), plan, LASTCALL_ENABLED="1", **env)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("kill", 0),
        pytest.param("kill", 1, marks=slow),
        pytest.param("exception", 0, marks=slow),
        pytest.param("exception", 1, marks=slow),
    ],
)
def test_torchrun_starts_both_machines_again_when_a_rank_of_one_has_died(
    launcher: Launcher, references: References, machines: list[Path], mirror: Path, kind: str, victim: int
) -> None:
    """The torchrun of the other machine does not count that as a restart."""
    plan = Plan(steps=24, seconds=0.02, fault=Fault(kind, victim, 8))
    job = restarting(launcher, machines, plan, **copies(mirror))
    assert set(job.wait().values()) == {0}, job.log()
    began = [
        [event.step for event in lines if event.what == "protected"] for lines in job.journals().values()
    ]
    assert began == [[0, 8], [0, 8]], job.log()
    assert [record["step"] for record in ranks_trials.records(mirror)] == [8, 24]
    if ranks_trials.records(mirror)[0]["exact"]:
        assert ranks_trials.reference(job.journals()).final == references.of("ddp.py", 2, plan).final


@pytest.mark.parametrize(
    ("script", "before", "after"),
    [
        ("fsdp.py", (4, [0, 1]), (2, [0, 1])),
        ("ddp.py", (2, [0, 1]), (1, [1])),  # the machine that had committed is gone
        pytest.param("ddp.py", (1, [1]), (2, [0, 1]), marks=slow),
        pytest.param("fsdp.py", (1, [0]), (2, [0, 1]), marks=slow),
        pytest.param("fsdp.py", (2, [0, 1]), (1, [0]), marks=slow),
        pytest.param("ddp.py", (2, [0, 1]), (4, [0, 1]), marks=slow),
    ],
)
def test_other_machines_and_another_number_of_ranks_go_on_from_the_same_checkpoint(
    launcher: Launcher,
    machines: list[Path],
    mirror: Path,
    script: str,
    before: tuple[int, list[int]],
    after: tuple[int, list[int]],
) -> None:
    first = launcher.fork(
        script, before[0], "agent", [machines[number] for number in before[1]], PLAN, **copies(mirror)
    )
    assert first.until(0, "at", 6), first.log()
    first.send(0, signal.SIGTERM)
    assert set(first.wait().values()) == {ranks_trials.SAVED}, first.log()
    (record,) = ranks_trials.records(mirror)
    shutil.rmtree(machines[0], ignore_errors=True)
    second = launcher.fork(
        script, after[0], "agent", [machines[number] for number in after[1]], PLAN, **copies(mirror)
    )
    assert set(second.wait().values()) == {0}, second.log()
    ends = ranks_trials.reference(second.journals()).final
    assert len({end["parameters"] for end in ends.values()}) == 1
    began = [
        event.step for lines in second.journals().values() for event in lines if event.what == "protected"
    ]
    assert began == [record["step"]] * after[0], second.log()
    assert [found["step"] for found in ranks_trials.records(mirror)] == [record["step"], 24]


@pytest.mark.timeout(120)
def test_a_store_that_has_stopped_answering_keeps_nobody_beyond_the_grace(
    launcher: Launcher, references: References, server: Server, machines: list[Path]
) -> None:
    """At the start, during training, and after the last step; the directories have what was saved."""
    env = {"LASTCALL_MIRROR": "s3://runs/exp1", "LASTCALL_GRACE_SECONDS": "3", **server.environment}
    server.process.send_signal(signal.SIGSTOP)
    before = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
    assert before.until(0, "joined") and before.until(1, "joined"), before.log()
    before.until_true(lambda: (machines[0] / ".lastcall" / "lock").exists(), "rank 0 in its directory")
    before.send(1, signal.SIGTERM)
    assert set(before.wait().values()) <= {ranks_trials.SAVED, -signal.SIGTERM}, before.log()
    server.process.send_signal(signal.SIGCONT)
    during = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
    assert during.until(0, "at", 6), during.log()
    server.process.send_signal(signal.SIGSTOP)
    assert during.until(0, "at", 8), during.log()
    during.send(1, signal.SIGTERM)
    assert set(during.wait().values()) == {ranks_trials.SAVED}, during.log()
    server.process.send_signal(signal.SIGCONT)
    last = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
    assert last.until(0, "at", 20), last.log()
    server.process.send_signal(signal.SIGSTOP)
    last.until_true(
        lambda: any(record["step"] == 24 for record in ranks_trials.records(machines[0])),
        "the last checkpoint",
    )
    last.send(0, signal.SIGTERM)
    assert set(last.wait().values()) <= {0, ranks_trials.SAVED}, last.log()
    assert last.codes()[0] == ranks_trials.SAVED, last.log()
    server.process.send_signal(signal.SIGCONT)
    end = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
    assert set(end.wait().values()) == {0}, end.log()
    assert ranks_trials.reference(end.journals()).final == references.of("ddp.py", 2, PLAN).final
    assert ranks_trials.records(server.folder / "runs" / "exp1")[-1]["step"] == 24


@slow
@pytest.mark.parametrize("machine", ["comes back", "is lost", "comes back later"])
def test_the_machine_that_has_committed_dies_before_it_has_copied(
    launcher: Launcher, references: References, server: Server, machines: list[Path], machine: str
) -> None:
    env = {"LASTCALL_MIRROR": "s3://runs/exp1", **server.environment}
    bucket, away = server.folder / "runs" / "exp1", machines[0].with_name("away")
    often = {"LASTCALL_SAVE_STRATEGY": "steps", "LASTCALL_SAVE_STEPS": "2"}
    first = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env, **often)
    first.until_true(lambda: bool(ranks_trials.records(bucket)), "the first copy")
    server.process.send_signal(signal.SIGSTOP)
    copied = ranks_trials.records(bucket)[-1]["step"]
    first.until_true(lambda: ranks_trials.records(machines[0])[-1]["step"] >= copied + 6, "more commits")
    for rank in range(2):
        first.send(rank, signal.SIGKILL)
    first.wait()
    server.process.send_signal(signal.SIGCONT)
    expected = ranks_trials.records(machines[0])[-1]["step"]
    if machine != "comes back":
        machines[0].rename(away)
        expected = ranks_trials.records(bucket)[-1]["step"]
    if machine == "comes back later":
        second = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
        assert second.until(0, "at", ranks_trials.records(away)[-1]["step"] + 2), second.log()
        second.send(0, signal.SIGTERM)
        second.wait()
        expected = ranks_trials.records(bucket)[-1]["step"]
        shutil.rmtree(machines[0])
        away.rename(machines[0])
    last = launcher.fork("ddp.py", 2, "agent", machines, PLAN, **env)
    assert set(last.wait().values()) == {0}, last.log()
    assert [
        event.step for lines in last.journals().values() for event in lines if event.what == "protected"
    ] == [expected] * 2, last.log()
    assert ranks_trials.reference(last.journals()).final == references.of("ddp.py", 2, PLAN).final
