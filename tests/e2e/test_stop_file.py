"""LASTCALL_STOP_FILE, as a pod has it: the preStop hook writes it, whatever stands between PID 1 and the
training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import PATIENCE, environment, until
from lastcall.kube.inject import package_volume

USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
# PID 1 of a namespace, as in a container
ALONE = ["unshare", *USER, "--pid", "--fork", "--kill-child", "--mount-proc"]
TRAIN = """
import sys, time
from pathlib import Path
print("begun", flush=True)
while len(sys.argv) > 2 and not Path(sys.argv[2]).exists():  # still importing
    time.sleep(0.01)
import torch, lastcall

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with lastcall.protect(sys.argv[1], model=model, optimizer=optimizer) as run:
    for step in run.steps(1_000_000):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("at", step, flush=True)
        time.sleep(0.01)
"""


class Container:
    """Containers of one pod, one after the other: a shell that does not exec is PID 1, and the training is
    below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.stop = folder / "stop-trainer"
        self.env = environment(
            LASTCALL_STOP_FILE=str(self.stop),
            LASTCALL_GRACE_SECONDS="40",
            LASTCALL_KILL_WAIT_SECONDS="0",
            LASTCALL_ENABLED="1",
        )
        (folder / "train.py").write_text(TRAIN)
        self.process: subprocess.Popen[bytes] | None = None
        self.output = folder / "output"

    def start(self, *arguments: object) -> None:
        command = (
            f"{sys.executable} {self.folder / 'train.py'} {self.run} {' '.join(map(str, arguments))}; "
            "code=$?; exit $code"
        )
        self.output.unlink(missing_ok=True)
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [*ALONE, "sh", "-c", command], env=self.env, stdout=output, stderr=output
            )

    def hook(self) -> None:
        """What the kubelet does first: the hook, with the container's environment."""
        subprocess.run(package_volume.PRE_STOP, env=self.env, check=True, timeout=PATIENCE)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def expect(self, part: str) -> None:
        def seen() -> bool:
            assert part in self.said() or self.process is None or self.process.poll() is None, self.said()
            return part in self.said()

        until(seen, f"{part!r}\n{self.said()}")

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("process namespaces cannot be made here")
    made = Container(tmp_path)
    yield made
    made.end()


def below(process: subprocess.Popen[bytes]) -> list[int]:
    """PID 1 of the namespace, as we see it."""
    return [
        int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


def test_a_shell_that_is_pid_1_swallows_sigterm_and_the_hook_comes_through(container: Container) -> None:
    container.start()
    container.expect("at 5")
    assert container.process is not None
    (shell,) = below(container.process)
    os.kill(shell, signal.SIGTERM)
    before = container.said().count("at ")
    until(lambda: container.said().count("at ") > before + 50, "training that goes on")
    assert "SIGTERM" not in container.said()
    container.hook()
    assert container.wait() == 75, container.said()
    assert f"stop file {container.stop} (preStop) received" in container.said()
    (record,) = chain.records(container.run)
    assert record["kind"] == "jit"
    events = [
        json.loads(line) for line in (container.run / ".lastcall" / "events-0.jsonl").read_text().splitlines()
    ]
    (notice,) = (event for event in events if event["kind"] == "notice")
    assert 30.0 < notice["deadline_in"] <= 40.0  # the pod's grace


def test_a_container_that_is_restarted_in_its_pod_does_not_stop_for_the_hook_of_the_one_before(
    container: Container,
) -> None:
    container.start()
    container.expect("at 5")
    container.hook()
    assert container.wait() == 75, container.said()
    container.start()
    container.expect("existed before this run")
    resumed = int(str(chain.records(container.run)[-1]["step"]))
    container.expect(f"at {resumed + 60}")  # more than half a second: it was looked for again and again
    assert container.process is not None and container.process.poll() is None
    container.hook()
    assert container.wait() == 75, container.said()


def test_a_hook_that_runs_before_python_has_imported_anything_is_heard(container: Container) -> None:
    container.start(container.folder / "imported")
    container.expect("begun")
    container.hook()
    (container.folder / "imported").touch()
    assert container.wait() == 75, container.said()
    assert "(preStop) received" in container.said() and "existed before" not in container.said()
