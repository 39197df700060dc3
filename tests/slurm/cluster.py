"""A whole Slurm on this machine: munged, slurmctld and slurmd with a configuration of their own, below one
temporary folder.

apt-get install slurm-wlm munge

It uses no cgroups, no accounting and no systemd, and disturbs no other Slurm: ports and sockets are its own.
Jobs run as its user.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from helpers.processes import forkserver as nursery
from helpers.servers.ports import free_ports

DAEMONS = ("munged", "slurmctld", "slurmd")
# seconds between SIGTERM and SIGKILL at the end of a job; 30 unless an administrator says otherwise
KILL_WAIT = 5
CPUS = 16  # more than there are: jobs that mostly wait do so beside each other
GRACE = 5  # seconds that a preempted job is given before that
# seconds until a requeued job may start; Slurm takes no less, and 120 unless an administrator says otherwise
REQUEUE_DELAY = 5

_CONFIGURATION = """
ClusterName=lastcall
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={worker}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_delay}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} MaxTime=10 State=UP
PartitionName=lowest Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0 MaxTime=10 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=10 State=UP
"""  # noqa: E501


def missing() -> list[str]:
    """The programs that have to be installed first."""
    return [
        name
        for name in (*DAEMONS, "sbatch", "srun", "scontrol", "scancel")
        if shutil.which(name, path=_path()) is None
    ]


class Cluster:
    """Leaving the block ends all jobs and daemons."""

    def __init__(self) -> None:
        # Not pytest's folder: munged refuses a socket that others cannot come to, and socket names are short.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) == len(DAEMONS) and all(daemon.poll() is None for _, daemon in self._daemons):
            self.clear()
        for _name, daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        controller, worker = free_ports(2)
        settings = {
            "cpus": CPUS,
            "user": getpass.getuser(),
            "kill_wait": KILL_WAIT,
            "grace": GRACE,
            "requeue_delay": REQUEUE_DELAY,
        }
        text = _CONFIGURATION.format(controller=controller, worker=worker, folder=self.folder, **settings)
        (self.folder / "slurm.conf").write_text(text)
        # loaded and never used; the default looks for systemd
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        files = {name: f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        self._spawn(
            "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files.values()
        )
        self._expect(lambda: (self.folder / "munge.socket").exists())
        self._spawn("slurmctld", "-D", "-c")
        self._expect(lambda: "is UP" in self.said("scontrol", "ping"))
        self._spawn("slurmd", "-D", "-N", "localhost")
        self._expect(lambda: self.said("sinfo", "-h", "-p", "low", "-o", "%T").strip() == "idle")

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            daemon = subprocess.Popen(
                [name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=self.environment(),
            )
        self._daemons.append((name, daemon))

    def _expect(self, condition: Callable[[], bool]) -> None:
        """Wait for it while the daemons live."""

        def holds() -> bool:
            for name, daemon in self._daemons:
                if daemon.poll() is not None:
                    raise AssertionError(f"{name} has ended with {daemon.returncode}:\n{self._log(name)}")
            return condition()

        name = self._daemons[-1][0]
        until(holds, f"{name} ready\n{self._log(name)}")

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")[-4000:]

    def environment(self, **more: str) -> dict[str, str]:
        """What sbatch takes over into the job, too; nothing of a Slurm in which the tests may be running."""
        plain = {
            name: value
            for name, value in nursery.environment().items()
            if not name.startswith(("SLURM", "SBATCH_"))
        }
        return {**plain, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def command(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, words)),
            capture_output=True,
            text=True,
            env=self.environment(),
            cwd=self.folder,
            timeout=60,
            check=False,
        )

    def said(self, *words: object) -> str:
        return self.command(*words).stdout

    def submit(self, folder: Path, script: str, *options: object, **env: str) -> Job:
        """Submit the lines of a batch script. Every life of the job writes to the same two files in
        `folder`."""
        path = folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        words = [
            "sbatch",
            "--parsable",
            "--open-mode=append",
            f"--chdir={folder}",
            "--output=out-%a",
            "--error=err-%a",
        ]
        done = subprocess.run(
            [*words, *map(str, options), str(path)],
            capture_output=True, text=True, env=self.environment(**env), cwd=folder, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return Job(self, folder, done.stdout.strip())

    def clear(self) -> None:
        """End all jobs, as the end of a test."""
        for words in (("--signal=KILL", "--full"), ()):
            names = self.said("squeue", "-h", "-o", "%i").split()
            if names:
                self.command("scancel", *words, *names)
        until(lambda: not self.said("squeue", "-h", "-o", "%i"), "an empty queue")


class Job:
    def __init__(self, cluster: Cluster, folder: Path, number: str) -> None:
        self._cluster = cluster
        self.folder = folder
        self.number = number

    def fields(self) -> dict[str, str]:
        """What `scontrol show job` says."""
        return dict(
            re.findall(r"(\w+)=(\S*)", self._cluster.said("scontrol", "show", "job", self.number, "-o"))
        )

    def lines(self) -> list[str]:
        text = "".join(path.read_text(errors="replace") for path in self.folder.glob("out-*"))
        return text[: text.rfind("\n") + 1].splitlines()

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.folder.glob("err-*"))

    def expect(self, start: str, count: int = 1) -> str:
        """Wait for the so-many-th line that starts like this; what follows on it."""

        def found() -> list[str]:
            return [line[len(start) :].strip() for line in self.lines() if line.startswith(start)]

        self.until(lambda: len(found()) >= count, f"a line {start!r}")
        return found()[count - 1]

    def wait(self) -> str:
        """The state in which it ended, COMPLETED or CANCELLED or FAILED, with its exit code."""
        self.until(
            lambda: self.fields()["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"),
            "the end of the job",
        )
        fields = self.fields()
        return f"{fields['JobState']} {fields['ExitCode']}"

    def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.fields()}\n{self.lines()[-5:]}\n{self.log()}") from None

    def signal(self, signum: signal.Signals) -> None:
        """To the batch script alone, as --signal=B: would."""
        self._cluster.command("scancel", f"--signal={signum.name[3:]}", "--batch", self.number)

    def cancel(self) -> None:
        self._cluster.command("scancel", self.number)


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until it holds, and no more often than Slurm's programs are started with ease."""

    def holds() -> bool:
        if condition():
            return True
        time.sleep(0.1)
        return False

    nursery.until(holds, what)


def _path() -> str:
    """Daemons are in sbin, which is not in everybody's PATH."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
