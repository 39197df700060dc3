"""Runs of many ranks as real processes: started in four ways, watched through their journals, hit by signals,
waited for with a limit.

    alone          forked from the nursery; the store is rank 0's, and nobody ends the others when one ends
    agent          forked as well, with what torchrun's agent adds: a store outside the ranks, and SIGTERM to
                   all when one fails
    torchrun       the real one
    lastcall run   the real one below the real `lastcall run`

A forked rank costs milliseconds, a started one the seconds that `import torch` takes: hundreds of trials use
the first two.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.processes import forkserver as nursery
from helpers.processes.forkserver import Child, Nursery
from helpers.ranks import plan as ranks_plan
from helpers.ranks.hosts import Hosts
from helpers.ranks.plan import Event, Plan
from helpers.servers.ports import free_port

SCRIPTS = Path(__file__).resolve().parents[2] / "e2e" / "ranks" / "scripts"
LIMIT = 60.0  # seconds that a life may take; more is a deadlock
IMPORTS = (  # what a forked rank need not import again
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.distributed.algorithms.join",
)
LASTCALL_RUN = [sys.executable, "-m", "lastcall", "run", "--"]
_AGENT_SECONDS = 0.1  # torchrun's agent looks at its workers so often
_QUICK = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1", "LASTCALL_KILL_WAIT_SECONDS": "0"}


class Deadlock(AssertionError):
    """A life did not end in time."""


@dataclass(frozen=True)
class Sent:
    """A signal that was sent. It was there no later than `at`."""

    rank: int
    signum: int
    at: float
    arrived: bool  # the process was there


class Job:
    """One life of a run: `ranks` processes whose journals and output are in `folder`."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.ranks = ranks

    # ---- what the ranks say --------------------------------------------------------------------------------

    def journal(self, rank: int) -> list[Event]:
        return ranks_plan.journal(self.folder, rank)

    def journals(self) -> dict[int, list[Event]]:
        return {rank: self.journal(rank) for rank in range(self.ranks)}

    def pid(self, rank: int) -> int:
        """Of its latest process; 0 before it has one."""
        starts = [event.pid for event in self.journal(rank) if event.what == "start"]
        return starts[-1] if starts else 0

    def said(self, rank: int, what: str, step: int = -1) -> bool:
        return any(event.what == what and event.step >= step for event in self.journal(rank))

    def until(self, rank: int, what: str, step: int = -1) -> bool:
        """Wait until a rank says so; False if the life ends before."""
        self.until_true(lambda: self.said(rank, what, step) or self.over(), f"rank {rank}: {what} {step}")
        return self.said(rank, what, step)

    def until_true(self, condition: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
        """Wait for anything. Deadlock, with what the ranks are doing, if it does not come."""
        try:
            nursery.until(condition, what, limit)
        except AssertionError as error:
            raise Deadlock(f"{error}\n{self.stacks()}") from None

    def send(self, rank: int, signum: int) -> Sent:
        pid = self.pid(rank)
        arrived = bool(pid) and _kill(pid, signum)
        return Sent(rank, signum, time.monotonic(), arrived)

    # ---- its end -------------------------------------------------------------------------------------------

    def codes(self) -> dict[int, int | None]:
        """The return codes by rank; those of launchers under -1, -2, ..."""
        raise NotImplementedError

    def over(self) -> bool:
        return None not in self.codes().values()

    def tend(self) -> None:
        """What an agent would do now."""

    def wait(self, limit: float = LIMIT) -> dict[int, int]:
        """The codes of all once all have ended. Deadlock, with the stacks of those that are left, if they do
        not."""
        deadline = time.monotonic() + limit
        while not self.over():
            if time.monotonic() > deadline:
                raise Deadlock(f"not over after {limit} s: {self.codes()}\n{self.stacks()}")
            self.tend()
            time.sleep(0.01)
        return {rank: code for rank, code in self.codes().items() if code is not None}

    def stacks(self) -> str:
        """What every rank that is left is doing, in the words of faulthandler."""
        for rank in range(self.ranks):
            if pid := self.pid(rank):
                _kill(pid, signal.SIGCONT)
                _kill(pid, signal.SIGABRT)
        time.sleep(0.5)
        return self.log()

    def log(self) -> str:
        """All that was written to stderr, and the last lines of the journals."""
        errors = [
            f"--- {path.name}\n{_shortened(path.read_text(errors='replace'))}"
            for path in sorted(self.folder.glob("stderr*"))
        ]
        last = [f"rank {rank}: {events[-2:]}" for rank, events in self.journals().items()]
        return "\n".join([*errors, *last])

    def end(self) -> None:
        """Kill what is left."""
        raise NotImplementedError


class Forked(Job):
    """Ranks from the nursery, spread over `hosts` if there are any. With `agent`, what torchrun does for its
    workers is done."""

    def __init__(
        self,
        warm: Nursery,
        folder: Path,
        script: Path,
        ranks: int,
        directories: Sequence[Path],
        agent: bool,
        hosts: Hosts | None,
        env: dict[str, str],
    ) -> None:
        """`directories`: each for as many ranks."""
        super().__init__(folder, ranks)
        self._agent = agent and hosts is None  # an agent signals the workers of its own host only
        self._failed: float | None = None
        self._told: set[int] = set()
        self._keeper: Child | None = None
        places = [
            hosts.environment(rank * hosts.count // ranks) if hosts else {"MASTER_ADDR": "127.0.0.1"}
            for rank in range(ranks)
        ]
        shared = {
            **_QUICK,
            **env,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks // hosts.count if hosts else ranks),
        }
        if agent:
            self._keeper = warm.start(folder, SCRIPTS / "keeper.py", folder / "port", **places[0])
            self._keeper.expect("ready")
            shared |= {"MASTER_PORT": (folder / "port").read_text(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": folder.name}
        else:
            shared |= {"MASTER_PORT": str(free_port())}
        self._children = [
            warm.start(
                folder,
                script,
                directories[rank * len(directories) // ranks],
                **{**shared, **place},
                RANK=str(rank),
                LOCAL_RANK=str(rank),
            )
            for rank, place in enumerate(places)
        ]

    def codes(self) -> dict[int, int | None]:
        return {rank: child.poll() for rank, child in enumerate(self._children)}

    def pid(self, rank: int) -> int:
        return self._children[rank].pid if self._children[rank].poll() is None else 0

    def tend(self) -> None:
        if not self._agent:
            return
        codes = self.codes()
        if self._failed is None and any(codes.values()):
            self._failed = time.monotonic()
        if self._failed is not None and time.monotonic() > self._failed + _AGENT_SECONDS:
            for rank, code in codes.items():
                if code is None and rank not in self._told:
                    self._told.add(rank)
                    self._children[rank].send(signal.SIGTERM)

    def end(self) -> None:
        for child in [*self._children, *([self._keeper] if self._keeper else [])]:
            child.end()


class Launched(Job):
    """Ranks below real launchers, one a host."""

    def __init__(
        self, folder: Path, ranks: int, commands: Sequence[Sequence[str]], env: dict[str, str]
    ) -> None:
        super().__init__(folder, ranks)
        given = nursery.environment(**{**_QUICK, **env})
        self._logs = [(folder / f"stderr-{number}").open("wb") for number in range(len(commands))]
        self.launchers = [
            subprocess.Popen(
                list(command), env=given, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            for command, file in zip(commands, self._logs, strict=True)
        ]

    def codes(self) -> dict[int, int | None]:
        return {-1 - number: launcher.poll() for number, launcher in enumerate(self.launchers)}

    def alive(self) -> list[int]:
        """The ranks whose latest process still runs."""
        return [rank for rank in range(self.ranks) if (pid := self.pid(rank)) and _running(pid)]

    def end(self) -> None:
        for pid in [
            *(self.pid(rank) for rank in self.alive()),
            *(launcher.pid for launcher in self.launchers),
        ]:
            try:
                os.killpg(os.getpgid(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        for launcher in self.launchers:
            launcher.wait()
        for file in self._logs:
            file.close()


class Launcher:
    """Starts lives, each in a folder of its own, and ends what is left of them."""

    def __init__(self, warm: Nursery, folder: Path) -> None:
        self.folder = folder
        self._warm = warm
        self._jobs: list[Job] = []

    def launch(
        self, script: str, ranks: int, how: str, directory: Path, plan: Plan, *options: str, **env: str
    ) -> Job:
        """`options` go to torchrun."""
        if how in ("alone", "agent"):
            return self.fork(script, ranks, how, directory, plan, **env)
        command = [*torchrun(ranks, "--standalone", *options), str(SCRIPTS / script), str(directory)]
        return self.launch_all(
            [[*LASTCALL_RUN, *command] if how == "lastcall run" else command], ranks, plan, **env
        )

    def fork(
        self,
        script: str,
        ranks: int,
        how: str,
        directory: Path | Sequence[Path],
        plan: Plan,
        hosts: Hosts | None = None,
        /,
        **env: str,
    ) -> Job:
        folder = self._new_folder()
        given = {**env, **_description(folder, plan)}
        directories = [directory] if isinstance(directory, Path) else directory
        job = Forked(self._warm, folder, SCRIPTS / script, ranks, directories, how == "agent", hosts, given)
        self._jobs.append(job)
        return job

    def launch_all(self, commands: Sequence[Sequence[str]], ranks: int, plan: Plan, **env: str) -> Launched:
        """A life below launchers of the test's own making."""
        folder = self._new_folder()
        job = Launched(folder, ranks, commands, {**env, **_description(folder, plan)})
        self._jobs.append(job)
        return job

    def _new_folder(self) -> Path:
        folder = self.folder / f"life-{len(self._jobs)}"
        folder.mkdir()
        return folder

    def end(self) -> None:
        for job in self._jobs:
            job.end()


def torchrun(ranks: int, *options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("torchrun")), *options, "--nproc-per-node", str(ranks)]


def _shortened(text: str, most: int = 6000) -> str:
    """What came first, and the stacks at the end, and lines of lastcall in between; without the frames that
    C++ prints."""
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("frame #"))
    if len(text) <= most:
        return text
    head, middle, tail = text[: most // 2], text[most // 2 : -most // 2], text[-most // 2 :]
    return f"{head}\n...\n{_ours(middle)}...\n{tail}"


def _ours(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if " lastcall: " in line)


def _description(folder: Path, plan: Plan) -> dict[str, str]:
    return {ranks_plan.PLAN: plan.to_json(), ranks_plan.FOLDER: str(folder)}


def _kill(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
