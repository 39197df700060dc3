"""A training as a Job on a real cluster, and what it says in all its lives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from helpers.kube import images as kube_images
from helpers.kube.api import Object, Refused, until
from helpers.kube.cluster import Cluster

SCRIPT = Path(__file__).resolve().parents[2] / "kube" / "train.py"
_QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def job(
    name: str,
    folder: Path,
    settings: Mapping[str, object],
    *,
    annotations: Mapping[str, str] = {},
    resources: Object | None = None,
    grace: int | None = None,
    shell: bool = False,
    logged: bool = False,
) -> Object:
    """The Job of somebody who has never heard of us, but for the annotations.

    `folder` is its volume; `grace` what its pod says; `shell`: a shell stays above the training, and swallows
    what the kubelet signals; `logged`: what lastcall says is in the pod's log, where people look for it, and
    not in a file that outlives the pod.
    """
    mounts = {**kube_images.MOUNTS, "code": SCRIPT.parent}
    volumes = [
        {"name": key, "hostPath": {"path": str(path)}} for key, path in {**mounts, "data": folder}.items()
    ]
    training = f"{kube_images.PYTHON} -u {SCRIPT} /data >> /data/out{'' if logged else ' 2>> /data/err'}"
    container = {
        "name": "train",
        "image": kube_images.TRAINING,
        "command": ["sh", "-c", f"{training}; exit $?" if shell else f"exec {training}"],
        "resources": resources or {},
        "env": [{"name": key, "value": str(value)} for key, value in {**_QUIET, **settings}.items()],
        "volumeMounts": [
            *({"name": key, "mountPath": str(path), "readOnly": True} for key, path in mounts.items()),
            {"name": "data", "mountPath": "/data"},
        ],
    }
    spec: Object = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    if grace is not None:
        spec["terminationGracePeriodSeconds"] = grace
    template = {"metadata": {"labels": {"training": name}}, "spec": spec}
    metadata = {"name": name, "annotations": dict(annotations)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": template}}


def uninterrupted(folder: Path, settings: Mapping[str, object]) -> str:
    """What it comes to when nobody stops it: the same script with the same packages, in a process of this
    machine."""
    env = {
        **os.environ,
        **_QUIET,
        **{key: str(value) for key, value in settings.items()},
        "PACE": "0",
        "SLOW": "0",
        "LASTCALL_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


class Training:
    """A Job that was submitted. Its lines are those of all its lives."""

    def __init__(self, cluster: Cluster, folder: Path, submitted: Object) -> None:
        self._cluster = cluster
        self.folder = folder
        self.name: str = submitted["metadata"]["name"]

    def lines(self, start: str = "") -> list[str]:
        path = self.folder / "out"
        text = path.read_text() if path.exists() else ""
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith(start)]

    def log(self) -> str:
        path = self.folder / "err"
        return path.read_text(errors="replace") if path.exists() else ""

    def pods(self) -> list[Object]:
        return self._cluster.api.pods(f"training={self.name}")

    def running(self) -> Object:
        """The pod that is not on its way out."""
        (pod,) = (
            pod
            for pod in self.pods()
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        )
        return pod

    def expect(self, start: str, count: int = 1) -> None:
        """Wait for the so-many-th line that starts like this."""
        until(
            lambda: len(self.lines(start)) >= count,
            lambda: f"{count} lines {start!r} of {self.name}\n{self.story()}",
        )

    def wait(self) -> None:
        """Until it has succeeded."""

        def ended() -> bool:
            status = self._cluster.api.get("Job", self.name)["status"]
            assert not any(it["type"] == "Failed" for it in status.get("conditions", [])), (
                f"{status}\n{self.story()}"
            )
            return bool(status.get("succeeded"))

        until(ended, lambda: f"the end of {self.name}\n{self.story()}")

    def gone(self, pod: Object) -> None:
        until(
            lambda: not self._is_there(pod),
            lambda: f"the end of the pod {pod['metadata']['name']}\n{self.story()}",
        )

    def _is_there(self, pod: Object) -> bool:
        try:
            found = self._cluster.api.get("Pod", pod["metadata"]["name"])
        except Refused:
            return False
        return bool(found["metadata"]["uid"] == pod["metadata"]["uid"])

    def story(self) -> str:
        """For a test that fails: what the cluster and the training have said."""
        states = [f"{pod['metadata']['name']}: {pod['status']}" for pod in self.pods()]
        events = self._cluster.kubectl("get", "events", "--sort-by=.lastTimestamp").stdout.splitlines()[-25:]
        return "\n".join([*states, *events, *self.lines()[-10:], self.log()[-4000:]])
