"""Notices that no signal brings: a training script under `lastcall run`, and local servers that speak for the
clouds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.processes.forkserver import PATIENCE, Nursery, environment, until
from helpers.servers.metadata import AwsServer, AzureServer, GcpServer, MetadataServer
from lastcall import testing
from lastcall.core.checkpoint.record import Record

SERVERS = {"aws": AwsServer, "gcp": GcpServer, "azure": AzureServer}
NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0"}

ENDLESS = """
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        for step in run.steps(1_000_000):
            training.say(step)
            training.step(model, optimizer)
"""
PATIENT = """
    import lastcall
    from helpers.models import training

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        for step in run.steps(20):
            training.say(step)
            if step == 10:
                training.wait_for("go")
            training.step(model, optimizer)
    training.finish(model=model, optimizer=optimizer)
"""


class Launched:
    """`lastcall run OPTIONS -- python SCRIPT`, in a session of its own."""

    def __init__(self, folder: Path, script: Path, *options: str, **env: str) -> None:
        self.run, self.result = folder / "run", folder / "result"
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        command = [
            sys.executable,
            "-m",
            "lastcall",
            "run",
            *options,
            "--",
            sys.executable,
            str(script),
            str(self.run),
            str(self.result),
        ]
        with open(self._stdout, "wb") as stdout, open(self._stderr, "wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env=environment(**{**NOW, **env}),
                start_new_session=True,
            )

    def expect(self, line: str) -> None:
        def seen() -> bool:
            if line in self._stdout.read_text().splitlines():
                return True
            if self._process.poll() is not None:
                raise AssertionError(
                    f"ended with {self._process.returncode} and no line {line!r}:\n{self.log()}"
                )
            return False

        until(seen, f"a line {line!r}")

    def log(self) -> str:
        return self._stderr.read_text()

    def wait(self) -> int:
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.log()}") from None

    def end(self) -> None:
        """The launcher, and whatever of its processes is left in its session."""
        self._process.kill()
        self._process.wait()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getsid(int(entry.name)) == self._process.pid:
                    os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue


Start = Callable[..., Launched]


@pytest.fixture
def start(tmp_path: Path, nursery: Nursery) -> Iterator[Start]:
    started: list[Launched] = []

    def run(source: str, *options: str, **env: str) -> Launched:
        started.append(Launched(tmp_path, nursery.write(tmp_path, source), *options, **env))
        return started[-1]

    yield run
    for launched in started:
        launched.end()


@pytest.fixture(scope="module")
def reference(warm: Nursery, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final state of the patient script without lastcall and without a cloud."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "go").touch()
    child = warm.run(
        folder, warm.write(folder, PATIENT), folder / "run", folder / "result", LASTCALL_ENABLED="0"
    )
    assert child.code == 0, child.log()
    return (folder / "result").read_text()


def endpoint(server: MetadataServer) -> dict[str, str]:
    if isinstance(server, GcpServer):
        return {"GCE_METADATA_HOST": server.host}
    return {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT"
        if isinstance(server, AwsServer)
        else "LASTCALL_AZURE_METADATA_ENDPOINT": server.url
    }


def announce(server: MetadataServer) -> float:
    """The end of this machine in the words of its cloud; the time of day when it comes."""
    if isinstance(server, AwsServer):
        server.interrupt(120.0)
        return time.time() + 120.0
    if isinstance(server, GcpServer):
        server.set("preempted", "TRUE")
    else:
        assert isinstance(server, AzureServer)
        server.announce("Preempt", 30.0)
    return time.time() + 30.0


def committed(run: Path, before: float) -> Record:
    """The record of the newest checkpoint: whole, exact, and there in time."""
    record = testing.assert_resumable(run, exact=True).record
    assert (run / f"checkpoint-{record.step}" / "lastcall.json").stat().st_mtime < before
    return record


@pytest.mark.parametrize("mode", ["chosen", "detected"])
@pytest.mark.parametrize("cloud", SERVERS)
def test_a_notice_of_the_cloud_leads_to_a_checkpoint_before_its_deadline(
    start: Start, cloud: str, mode: str
) -> None:
    with SERVERS[cloud]() as server:
        run = start(ENDLESS, "--cloud", cloud if mode == "chosen" else "auto", **endpoint(server))
        run.expect("at 3")
        deadline = announce(server)
        assert run.wait() == 75, run.log()
    record = committed(run.run, deadline)
    assert record.step > 3
    assert {"aws": "EC2 spot interruption", "gcp": "Compute Engine preemption", "azure": "Azure Preempt"}[
        cloud
    ] in record.reason


@pytest.mark.parametrize(
    "behaviour",
    ["hang", "garbage", *(pytest.param(name, marks=pytest.mark.slow) for name in ("500", "dribble"))],
)
@pytest.mark.parametrize("cloud", SERVERS)
def test_a_bad_metadata_server_never_disturbs_training(
    start: Start, tmp_path: Path, cloud: str, behaviour: str, reference: str
) -> None:
    with SERVERS[cloud]() as server:
        server.behaviour = behaviour
        run = start(PATIENT, "--cloud", cloud, **endpoint(server))
        run.expect("at 10")
        until(lambda: bool(server.requests), "a question to the server")
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.log()
    assert run.result.read_text() == reference
    assert "Traceback" not in run.log()


def test_a_server_that_recovers_is_heard(start: Start) -> None:
    with AzureServer() as server:
        server.behaviour = "500"
        run = start(ENDLESS, "--cloud", "azure", **endpoint(server))
        run.expect("at 3")
        until(lambda: len(server.requests) >= 2, "two questions to the server")
        deadline = announce(server)
        server.behaviour = "good"
        assert run.wait() == 75, run.log()
    committed(run.run, deadline)


def test_a_stop_file_stops_the_run_within_the_grace_that_it_grants(start: Start, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    run = start(ENDLESS, "--cloud", "none", "--stop-file", str(stop))
    run.expect("at 3")
    deadline = time.time() + 25.0
    stop.write_text('{"grace": 25, "reason": "node drain"}')
    assert run.wait() == 75, run.log()
    assert committed(run.run, deadline).reason == f"stop file {stop} (node drain)"


def test_the_end_of_the_slurm_allocation_stops_the_run_before_it(start: Start, tmp_path: Path) -> None:
    end = int(time.time()) + 40
    (tmp_path / "empty").mkdir()
    environ = {
        "SLURM_JOB_ID": "71",
        "SLURM_JOB_END_TIME": str(end),
        "LASTCALL_SLURM_LEAD_SECONDS": "1000",
        "PATH": str(tmp_path / "empty"),
    }
    run = start(ENDLESS, "--cloud", "none", "--platform", "slurm", "--linger", "0.1", **environ)
    assert run.wait() == 75, run.log()
    assert "the allocation ends at" in committed(run.run, end).reason
