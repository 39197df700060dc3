"""`lastcall run --guard`: a training process that is killed without a word is saved by the guardian and comes
back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes.forkserver import environment, until
from lastcall import testing
from lastcall.core.checkpoint.catalog import Catalog
from lastcall.storage.files import Files
from lastcall.types import Kind

STEPS = 3000
TRAIN = """
    import os
    import sys
    import time
    import torch
    import lastcall
    from helpers.models import training

    def say(line):
        os.write(1, f"{line}\\n".encode())  # in one piece: print() is killed between two of its writes, and the next life goes on there

    training.seed()
    weights = torch.nn.Parameter(torch.zeros(400_000))
    optimizer = torch.optim.AdamW([weights], lr=1e-3)
    steps = int(os.environ["STEPS"])
    with lastcall.protect(training.DIRECTORY, weights=weights, optimizer=optimizer) as run:
        say(f"resumed {run.resumed} {os.getpid()}")
        for step in run.steps(steps):
            weights.grad = torch.randn_like(weights)
            optimizer.step()
            if step % 50 == 0:
                say(f"at {step}")
            if os.environ.get("EAT") and run.resumed is None and step == steps // 2:
                eaten = []
                while True:
                    eaten.append(torch.ones(1 << 20))
    training.finish(weights=weights, optimizer=optimizer)
"""  # noqa: E501


class Launched:
    """A command under `lastcall run`, with its output in files."""

    def __init__(self, folder: Path, *options: str, prefix: tuple[str, ...] = (), **env: str) -> None:
        script = folder / "train.py"
        script.write_text(textwrap.dedent(TRAIN))
        self.run, self.result = folder / "run", folder / "result"
        self._out, self._err = folder / "out", folder / "err"
        command = [sys.executable, "-m", "lastcall", "run", "--cloud", "none", *options, "--"]
        command += [sys.executable, str(script), str(self.run), str(self.result)]
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [*prefix, *command],
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=environment(STEPS=str(STEPS), **env),
            )

    def lines(self, start: str) -> list[str]:
        text = self._out.read_text()
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith(start)]

    def log(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self) -> int:
        return self.process.wait(120)

    def trainer(self, life: int) -> int:
        until(
            lambda: len(self.lines("resumed")) >= life or self.process.poll() is not None,
            f"life {life}\n{self.log()}",
        )
        return int(self.lines("resumed")[life - 1].split()[2])


@pytest.fixture
def reference(tmp_path: Path) -> str:
    folder = tmp_path / "reference"
    folder.mkdir()
    launched = Launched(folder, LASTCALL_ENABLED="0")
    try:
        assert launched.wait() == 0, launched.log()
        return launched.result.read_text()
    finally:
        end(launched)


def end(launched: Launched) -> None:
    if launched.process.poll() is None:
        os.killpg(launched.process.pid, signal.SIGKILL)
        launched.process.wait()


def guarded(launched: Launched, life: int) -> None:
    """Wait until this life has put a snapshot into shared memory and has gone on from there."""
    said = launched.log().count("Guarded: copies")
    until(lambda: launched.log().count("Guarded: copies") >= life, f"an area, {said}\n{launched.log()}")
    before = len(launched.lines("at"))
    until(
        lambda: len(launched.lines("at")) > before + 1 or launched.process.poll() is not None,
        f"steps\n{launched.log()}",
    )


def kinds(run: Path) -> list[Kind]:
    return [entry.record.kind for entry in Catalog(run, Files()).entries()]


@pytest.mark.smoke
def test_a_killed_trainer_is_saved_by_the_guardian_and_ends_bit_identical(
    tmp_path: Path, reference: str
) -> None:
    launched = Launched(tmp_path, "--guard", "--guard-steps", "5", "--backoff", "0.1")
    try:
        for life, signum in enumerate((signal.SIGKILL, signal.SIGSEGV), start=1):
            pid = launched.trainer(life)
            guarded(launched, life)
            os.kill(pid, signum)
        assert launched.wait() == 0, launched.log()
    finally:
        end(launched)
    assert len(launched.lines("resumed")) == 3, launched.log()
    assert all(line.split()[1] != "None" for line in launched.lines("resumed")[1:]), launched.log()
    assert launched.log().count("from shared memory") == 2
    assert launched.result.read_text() == reference
    assert not list(Path("/dev/shm").glob(f"lastcall-{os.getuid()}-{pid}-*"))


def test_without_a_restart_the_exit_code_asks_to_be_run_again(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "--guard", "--guard-steps", "5", "--restart", "never")
    try:
        pid = launched.trainer(1)
        guarded(launched, 1)
        os.kill(pid, signal.SIGABRT)
        assert launched.wait() == 75, launched.log()
    finally:
        end(launched)
    assert kinds(launched.run)[0] is Kind.GUARD
    testing.assert_resumable(launched.run, exact=True)


def test_a_trainer_that_raises_is_saved_as_well(tmp_path: Path) -> None:
    """An exception is no notice either, and the last boundary is worth as much."""
    launched = Launched(tmp_path, "--guard", "--guard-steps", "5", "--restart", "never")
    try:
        pid = launched.trainer(1)
        guarded(launched, 1)
        os.kill(pid, signal.SIGINT)  # KeyboardInterrupt, since SIGINT is not among the signals
        code = launched.wait()
    finally:
        end(launched)
    assert code in (75, 130), launched.log()
    testing.assert_resumable(launched.run, exact=True)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group with little memory, made for this test."""
    name = f"lastcall-test-{uuid.uuid4().hex[:8]}"
    for root, limit, value in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "700M"),
        (Path("/sys/fs/cgroup"), "memory.max", "700M"),
    ):
        group = root / name
        try:
            group.mkdir()
            (group / limit).write_text(value)
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        break
    else:
        pytest.skip("no control group of ours with a memory limit can be made here")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text().strip(), "an empty group")
    group.rmdir()


def test_a_trainer_killed_by_the_kernel_for_memory_is_survived(
    tmp_path: Path, reference: str, limited: Path
) -> None:
    enter = ("bash", "-c", f'echo $$ > {limited}/cgroup.procs && exec "$@"', "bash")
    launched = Launched(tmp_path, "--guard", "--guard-steps", "5", "--backoff", "0.1", prefix=enter, EAT="1")
    try:
        assert launched.wait() == 0, launched.log()
    finally:
        end(launched)
    assert len(launched.lines("resumed")) == 2, launched.log()
    assert "SIGKILL" in launched.log()
    assert int(launched.lines("resumed")[1].split()[1]) > STEPS // 2 - 20
    assert launched.result.read_text() == reference
