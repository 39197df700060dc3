"""`lastcall kube pause`: suspends a job, waits until its pods are gone, and reports what they saved.

The pods are watched from before they get the signal: when they have exited, they are deleted, and the
termination messages of their containers with them. The last state of an object comes with its deletion.

Discarded: asking every second (a pod may exit and be deleted in between); reading the logs (the words in them
are for people, and the command may write its output elsewhere).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lastcall import clock as clocks
from lastcall import errors
from lastcall.kube.jobs import jobs, progress
from lastcall.kube.jobs.jobs import ClusterJob, Pod
from lastcall.kube.jobs.kubectl import Kubectl

_LISTENING = 3.0  # seconds until the watches must show something: a small run exits right after the signal
_LAST_NEWS = 5.0  # seconds for which a watch may lag behind the list that no longer has its pod


@dataclass(frozen=True)
class PodEnding:
    """How the run in a pod ended, according to the termination message of its container."""

    pod: Pod
    outcome: str | None = None  # an Outcome: "saved", ...; None: unknown, since there was no message of ours
    words: str = ""


@dataclass(frozen=True)
class Paused:
    target: ClusterJob
    new: bool  # it was not paused before
    waited: bool
    gone: bool  # all of its pods
    endings: Sequence[PodEnding] = ()

    @property
    def lost(self) -> bool:
        """The pods are gone, and none of them has said that it saved."""
        return (
            self.gone
            and bool(self.endings)
            and not any(ending.outcome in ("saved", "finished") for ending in self.endings)
        )


class PodWatch:
    """Watches a pod on a thread of its own, until its container has ended or the pod is deleted."""

    def __init__(self, kubectl: Kubectl, pod: Pod, tell: Callable[[str], None]) -> None:
        self._pod = pod
        self._tell = tell
        self._ending = PodEnding(pod)
        self.ready = threading.Event()
        self._process: subprocess.Popen[str] = kubectl.following(
            "get", "pods", pod.name, "--watch", "--output-watch-events", "-o", "json"
        )
        self._thread = threading.Thread(target=self._listen, name=f"lastcall-pod-{pod.name}", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # it was closed
            for event in documents(self._process.stdout):
                self.ready.set()
                body = event.get("object")
                pod = jobs.pod_of(body if isinstance(body, dict) else {})
                if pod.terminated:
                    self._note(pod)
                if pod.terminated or event.get("type") == "DELETED":
                    break
        self.ready.set()

    def _note(self, pod: Pod) -> None:
        found = progress.ending(pod.message)
        if found is not None:
            self._ending = PodEnding(self._pod, *found)
            self._tell(f"{self._pod.name}: {found[1]}")

    def ending(self) -> PodEnding:
        """The ending, once the pod is gone."""
        self._thread.join(_LAST_NEWS)
        self.close()
        return self._ending

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        self._thread.join(_LAST_NEWS)
        if self._process.stdout is not None:
            self._process.stdout.close()


def documents(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in kubectl's output, each as soon as it is complete: kubectl indents what is inside of
    one."""
    text = ""
    for line in lines:
        text += line
        if not line.startswith("}") and not (text == line and line.rstrip().endswith("}")):
            continue
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(text)
            if isinstance(found, dict):
                yield found
        text = ""


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
    watches = [PodWatch(kubectl, pod, tell) for pod in running if pod.phase == "Running"] if wait else []
    try:
        give_up = clock.now() + _LISTENING
        for watch in watches:
            watch.ready.wait(max(0.0, give_up - clock.now()))
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
            endings=[watch.ending() for watch in watches] if gone else [],
        )
    finally:
        for watch in watches:
            watch.close()


def _wait(
    kubectl: Kubectl,
    target: ClusterJob,
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
