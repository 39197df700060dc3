"""`lastcall kube pause`: suspends a job, waits until its pods are gone, and reports what they saved.

The logs are followed from before the pods get the signal: when they have exited, the pods are deleted, and
their logs with them.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lastcall import clock as clocks
from lastcall import errors
from lastcall.kube.jobs import jobs, progress
from lastcall.kube.jobs.jobs import Pod, Target
from lastcall.kube.jobs.kubectl import Kubectl

_LISTENING = 3.0  # seconds until the logs must flow: a small run saves and exits right after the signal
_LAST_WORDS = 5.0  # seconds for which a log may still flow after its pod is gone
_LINES = "20"  # lines of the log's end to read, so that there is some output at once


@dataclass(frozen=True)
class Ending:
    """How the run in a pod ended, according to its log."""

    pod: Pod
    outcome: str | None = None  # "saved", "not saved", "finished"
    words: str = ""


@dataclass(frozen=True)
class Paused:
    target: Target
    new: bool  # it was not paused before
    waited: bool
    gone: bool  # all of its pods
    endings: Sequence[Ending] = ()

    @property
    def lost(self) -> bool:
        """The pods are gone, and none of them logged that it saved."""
        return (
            self.gone
            and bool(self.endings)
            and not any(ending.outcome in ("saved", "finished") for ending in self.endings)
        )


class LogFollower:
    """Follows the log of a pod on a thread of its own."""

    def __init__(self, kubectl: Kubectl, pod: Pod, tell: Callable[[str], None]) -> None:
        self._pod = pod
        self._tell = tell
        self._told = False  # the pods got the signal: log lines from now on are the answer
        self._outcome: str | None = None
        self._words = ""
        self.ready = threading.Event()
        self._process: subprocess.Popen[str] = kubectl.following(
            "logs", pod.name, "-c", pod.container, "-f", f"--tail={_LINES}"
        )
        self._thread = threading.Thread(target=self._listen, name=f"lastcall-log-{pod.name}", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # it was closed
            for line in self._process.stdout:
                self.ready.set()
                self._hear(line)
        self.ready.set()

    def _hear(self, line: str) -> None:
        found = progress.ending(line)
        if found is None or not self._told:
            return
        if self._outcome in (None, found[0]) or found[0] == "saved":
            self._outcome, self._words = found
        self._tell(f"{self._pod.name}: {found[1]}")

    def told(self) -> None:
        self._told = True

    def ending(self) -> Ending:
        """The ending, once the log is complete."""
        self._thread.join(_LAST_WORDS)
        self.close()
        return Ending(self._pod, self._outcome, self._words)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        self._thread.join(_LAST_WORDS)
        if self._process.stdout is not None:
            self._process.stdout.close()


def pause(
    kubectl: Kubectl,
    name: str,
    *,
    wait: bool = True,
    timeout: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
    clock: clocks.Clock | None = None,
    interval: float = 1.0,
) -> Paused:
    """Suspend a job, so that it gets SIGTERM and saves. `tell` is called with a line for each event in the
    meantime."""
    clock = clock or clocks.Clock()
    target = jobs.find(kubectl, name)
    if target.ended is not None:
        raise errors.LastcallError(f"{target} has already {target.ended}: there is nothing to pause")
    if target.owner is not None:
        raise errors.LastcallError(
            f"{target} belongs to {target.owner}, which would restart it: pause that one"
        )
    if (why := target.unpausable) is not None and not target.paused:
        raise errors.LastcallError(f"{target} cannot be paused: {why}")
    running = [pod for pod in jobs.pods(kubectl, target) if not pod.gone]
    followers = [LogFollower(kubectl, pod, tell) for pod in running if pod.phase == "Running"] if wait else []
    try:
        give_up = clock.now() + _LISTENING
        for follower in followers:
            follower.ready.wait(max(0.0, give_up - clock.now()))
        for follower in followers:
            follower.told()
        new = not target.paused
        tell(f"{'Pausing' if new else 'Paused already:'} {target}, which has {len(running)} pod(s)")
        after = jobs.suspend(kubectl, target) if new else target
        if not wait:
            return Paused(after, new, waited=False, gone=not running)
        gone = _wait(kubectl, target, len(running), timeout, tell, clock, interval)
        return Paused(
            after,
            new,
            waited=True,
            gone=gone,
            endings=[follower.ending() for follower in followers] if gone else [],
        )
    finally:
        for follower in followers:
            follower.close()


def _wait(
    kubectl: Kubectl,
    target: Target,
    before: int,
    timeout: float | None,
    tell: Callable[[str], None],
    clock: clocks.Clock,
    interval: float,
) -> bool:
    """Until all pods are gone. False if that takes too long."""
    give_up = None if timeout is None else clock.now() + timeout
    while there := [pod for pod in jobs.pods(kubectl, target) if not pod.gone]:
        if len(there) != before:
            before = len(there)
            tell(f"{before} pod(s) still there: {', '.join(pod.name for pod in there)}")
        if give_up is not None and clock.now() >= give_up:
            return False
        clock.sleep(interval)
    return True
