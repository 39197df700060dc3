"""The two pods of a TrainJob without a cluster: the command that the SDK wrote, run by two bashes as two
kubelets would, with the variables that Kubeflow's torch plugin adds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.kubeflow import functions as kubeflow_functions
from helpers.kubeflow import objects as kubeflow_objects
from helpers.kubeflow import plain as kubeflow_plain
from helpers.kubeflow.api import FakeApi
from helpers.processes import interruption_chain as chain
from helpers.servers.ports import free_port

EPOCHS = 3


class Pods:
    """Of one life of the job; each in a folder of its own."""

    def __init__(self, job: kubeflow_objects.Object, folder: Path) -> None:
        folder.mkdir()
        (folder / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        (folder / "torchrun").chmod(0o755)
        (container,) = kubeflow_objects.pod_template(job)["spec"]["containers"]
        said = {variable["name"]: variable["value"] for variable in container["env"]}
        plugin = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(free_port()),
        }
        self._folders = [folder / "0", folder / "1"]
        self.processes = []
        for rank, place in enumerate(self._folders):
            place.mkdir()
            environ = {"PATH": f"{folder}:{os.environ['PATH']}", **said, **plugin, "PET_NODE_RANK": str(rank)}
            with (place / "log").open("w") as log:
                command = kubeflow_objects.expanded(container["command"], environ)
                self.processes.append(
                    subprocess.Popen(command, cwd=place, env=environ, stdout=log, stderr=log)
                )

    def log(self) -> str:
        return "\n".join((folder / "log").read_text() for folder in self._folders)

    def expect(self, words: str) -> None:
        deadline = time.monotonic() + 150
        while words not in self.log():
            assert time.monotonic() < deadline and all(one.poll() is None for one in self.processes), (
                self.log()
            )
            time.sleep(0.2)

    def wait(self) -> list[int]:
        return [one.wait(150) for one in self.processes]


@pytest.fixture
def started() -> Iterator[list[Pods]]:
    pods: list[Pods] = []
    yield pods
    for one in (process for life in pods for process in life.processes):
        one.kill()
        one.wait()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_nodes_are_told_to_stop_save_one_step_and_go_on_to_the_same_bits(
    tmp_path: Path, started: list[Pods]
) -> None:
    trainer = kubeflow_objects.of_the_seed(
        func=kubeflow_functions.train,
        func_args={"epochs": EPOCHS, "pause": 0.5},
        env=kubeflow_plain.TWO_NODES,
        package=None,
        periodic_checkpoint_config=None,
        enable_progress_tracking=False,
        output_dir=str(tmp_path / "volume"),
    )
    with FakeApi(tmp_path) as api:
        kubeflow_objects.submit(api.kubeconfig, trainer)
    (job,) = api.created
    started.append(Pods(job, tmp_path / "first"))
    started[0].expect("step 3")
    for process in started[0].processes:
        process.send_signal(signal.SIGTERM)
    assert started[0].wait() == [1, 1], started[0].log()  # torchrun's own: it makes that of every code but 0
    (record,) = chain.records(tmp_path / "volume")
    assert (record["kind"], record["world"], record["exact"]) == ("jit", 2, True)
    started.append(Pods(job, tmp_path / "second"))
    assert started[1].wait() == [0, 0], started[1].log()
    assert started[1].log().count(f"[Kubeflow] Auto-resuming from checkpoint-{record['step']}") == 2
    assert (tmp_path / "volume" / "final" / "model.safetensors").read_bytes() == kubeflow_plain.weights(
        tmp_path / "plain", EPOCHS, 2
    )
