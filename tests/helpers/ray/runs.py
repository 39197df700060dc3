"""One run of a script of tests/ray/scripts on a cluster: its lives, as its own diary tells them, and the
notices that end them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.ray.cluster import Cluster, Driver, until

SCRIPTS = Path(__file__).resolve().parents[2] / "ray" / "scripts"
PROTECTED = {"RAY_TRAIN_JIT_CHECKPOINT_ENABLED": "1", "RAY_TRAIN_JIT_CHECKPOINT_KILL_WAIT": "0.5"}
# a report takes one such look
QUICK = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.3"}
LIVES = 2  # of a run that was interrupted once


@dataclass
class Life:
    """From a start of the worker group to the next."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)

    @property
    def began_at(self) -> int:
        """The updates that the script's own code has loaded; the same for every rank."""
        (number,) = {start["updates"] for start in self.starts}
        return int(number)

    @property
    def reached(self) -> int:
        return max((step["updates"] for step in self.steps), default=self.began_at)


class Run:
    """A run may have several drivers, one after the other, on several clusters: what lasts is its folder."""

    def __init__(self, folder: Path, script: str, *options: object, workers: int = 2, **env: str) -> None:
        self.folder = folder
        self.script = script
        self.workers = workers
        self.storage = folder / "storage"
        self.diary = folder / "diary"
        self._options = options
        self._env = env

    def start(self, cluster: Cluster, **env: str) -> Driver:
        named = ("--name", "exp", "--storage", self.storage, "--diary", self.diary, "--workers", self.workers)
        self.cluster = cluster
        self.driver = cluster.run(
            SCRIPTS / f"{self.script}.py",
            *named,
            *self._options,
            **{**QUICK, **PROTECTED, **self._env, **env},
        )
        return self.driver

    @property
    def experiment(self) -> Path:
        return self.storage / "exp"

    def lines(self) -> list[dict[str, Any]]:
        text = self.diary.read_text() if self.diary.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def lives(self) -> list[Life]:
        """A rank's process is used for one life, so a new life begins where a rank starts that has started
        already."""
        lives: list[Life] = []
        for line in self.lines():
            if line["event"] == "start" and (
                not lives or line["rank"] in {start["rank"] for start in lives[-1].starts}
            ):
                lives.append(Life())
            {"start": lives[-1].starts, "step": lives[-1].steps, "end": lives[-1].ends}[line["event"]].append(
                line
            )
        return lives

    def pids(self) -> dict[int, int]:
        """The processes of the ranks of the last life."""
        return {start["rank"]: start["pid"] for start in self.lives()[-1].starts}

    def until_step(self, updates: int, life: int = 1) -> None:
        """All ranks of that life have done so many updates."""

        def there() -> bool:
            lives = self.lives()
            reached = (
                {step["rank"] for step in lives[-1].steps if step["updates"] >= updates}
                if len(lives) == life
                else ()
            )
            return len(lives) > life or len(reached) == self.workers

        self.driver.until(there, f"{updates} updates in life {life} of {self.script}")
        assert len(self.lives()) == life, "it was restarted before anybody told it to stop"

    def until_life(self, number: int) -> None:
        self.driver.until(
            lambda: len(self.lives()) >= number and len(self.lives()[-1].starts) == self.workers,
            f"life {number} of {self.script}",
        )

    def hurry(self) -> None:
        """Nothing is left to be tested: the rest of the training takes no time."""
        Path(f"{self.diary}.hurry").touch()

    def finish(self) -> str:
        """Everything the driver has said, when it has ended well."""
        self.hurry()
        code = self.driver.wait()
        assert code == 0, self.driver.said()[-8000:]
        return self.driver.said()

    def checkpoints(self) -> list[str]:
        """What stands in Ray's own list; a checkpoint that is not there is not committed."""
        path = self.experiment / "checkpoint_manager_snapshot.json"
        body: dict[str, Any] = {"checkpoint_results": []}

        def read() -> bool:
            """Ray writes over the file, so that it is empty for a moment."""
            try:
                body.update(json.loads(path.read_text()) if path.exists() else {})
            except ValueError:
                return False
            return True

        until(read, lambda: f"a whole {path}")
        return [Path(result["checkpoint_dir_name"]).name for result in body["checkpoint_results"]]

    def folders(self) -> list[str]:
        """What lies in the run's folder, committed or not."""
        return sorted(path.name for path in self.experiment.glob("checkpoint_*") if path.is_dir())

    def records(self) -> list[dict[str, Any]]:
        """What lastcall has written beside the checkpoints that it brought about."""
        files = sorted((self.experiment / ".lastcall").glob("checkpoint_*.json"))
        return [json.loads(path.read_text()) for path in files]


def one_worker(run: Run) -> None:
    os.kill(run.pids()[run.workers - 1], signal.SIGTERM)


def all_workers(run: Run) -> None:
    for pid in run.pids().values():
        os.kill(pid, signal.SIGTERM)


def node(run: Run) -> None:
    """The pod of the last rank is deleted: its `ray start` hears of it, and no train worker does."""
    run.cluster.node_of(run.pids()[run.workers - 1]).terminate()


def autoscaler(run: Run) -> None:
    """Ray is told that the node of the last rank will be gone in half a minute; nobody is signalled."""
    run.cluster.drain(run.cluster.node_of(run.pids()[run.workers - 1]), 30)


NOTICES: dict[str, Callable[[Run], None]] = {
    "one worker": one_worker,
    "all workers": all_workers,
    "node": node,
    "autoscaler": autoscaler,
}
NODES = ("node", "autoscaler")  # after which there is one node less


def assert_nothing_lost(run: Run, said: str, reference: Sequence[str]) -> None:
    """Two lives, the second of which begins with every bit of the last step of the first, and ends as though
    there had been one."""
    first, second = lives = run.lives()
    assert len(lives) == LIVES
    assert {start["digest"] for start in second.starts} == {reference[second.began_at]}
    assert first.reached == second.began_at, "steps were done after the save, or none was saved"
    assert {step["digest"] == reference[step["updates"]] for step in second.steps} == {True}
    assert {end["digest"] for end in second.ends} == {reference[-1]}
    assert "JIT checkpoint completed in" in said
