"""Trainings whose directory dies with their machine: what is in the bucket of a real S3 server brings them
back."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import interruption_chain as chain
from helpers.processes.forkserver import Child, Nursery, until
from helpers.servers import s3 as s3_server
from helpers.servers.s3 import Server

NOW = {"LASTCALL_KILL_WAIT_SECONDS": "0"}
SCRIPT = """
    import os
    from pathlib import Path
    import lastcall
    from helpers.models import training
    from lastcall.storage import s3

    if "SLOW_STORE" in os.environ:
        send = s3.Bucket.send

        def slowly(*args, **more):
            training.wait_for("store")
            send(*args, **more)

        s3.Bucket.send = slowly

    model, optimizer = training.parts()
    with lastcall.protect(training.DIRECTORY, model=model, optimizer=optimizer) as run:
        print("resumed", run.resumed, flush=True)
        for step in run.steps(60):
            training.say(step)
            training.step(model, optimizer)
            if step == int(os.environ.get("FAIL_AT", "-1")):
                training.wait_for("failure")
                raise ValueError("a bad batch")
    training.finish(model=model, optimizer=optimizer)
    if os.environ.get("LASTCALL_ENABLED") != "0":
        Path(training.DIRECTORY, "final").mkdir()
        Path(training.DIRECTORY, "final", "card.md").write_text("done")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_server.served(tmp_path_factory.mktemp("s3") / "buckets") as found:
        yield found


@pytest.fixture(scope="module")
def peace(warm: Nursery, tmp_path_factory: pytest.TempPathFactory) -> str:
    """How a run ends that nobody interrupts."""
    folder = tmp_path_factory.mktemp("peace")
    child = warm.run(
        folder, warm.write(folder, SCRIPT), folder / "unused", folder / "result", LASTCALL_ENABLED="0"
    )
    assert child.code == 0, child.log()
    return (folder / "result").read_text()


class Case:
    def __init__(self, nursery: Nursery, folder: Path, server: Server) -> None:
        self._nursery = nursery
        self._server = server
        self.folder = folder
        self.run = folder / "run"
        self._script = nursery.write(folder, SCRIPT)
        self.bucket = server.bucket("runs") / folder.name

    def start(self, run: Path | None = None, /, **env: str) -> Child:
        given = {**NOW, "LASTCALL_MIRROR": f"s3://runs/{self.folder.name}", **self._server.environment, **env}
        return self._nursery.start(
            self.folder, self._script, run or self.run, self.folder / "result", **given
        )

    def caught_copying(self) -> Child:
        """One that was told to stop, has saved and said so, and does not get on with its copy."""
        child = self.start(LASTCALL_GRACE_SECONDS="600", SLOW_STORE="1")
        child.expect("at 7")
        child.send(signal.SIGTERM)
        child.expect("waiting for store")
        until(lambda: (self.bucket / ".lastcall" / "leaving.json").exists(), "its word")
        return child

    def copied(self) -> list[int]:
        """The steps of the checkpoints in the bucket, oldest first."""
        return [int(str(record["step"])) for record in chain.records(self.bucket)]

    def finished(self, child: Child) -> str:
        assert child.wait() == 0, child.log()
        return (self.folder / "result").read_text()


@contextlib.contextmanager
def killed_after(child: Child, seconds: float) -> Iterator[None]:
    """As the kubelet does: whoever is still there then has no exit code of its own."""
    timer = threading.Timer(seconds, lambda: child.send(signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_a_directory_that_is_lost_after_the_notice_costs_not_a_single_step(
    nursery: Nursery, tmp_path: Path, server: Server, peace: str
) -> None:
    case = Case(nursery, tmp_path, server)
    first = case.start()
    first.expect("at 7")
    first.send(signal.SIGTERM)
    assert first.wait() == chain.SAVED, first.log()
    (saved,) = case.copied()
    assert [record["step"] for record in chain.records(case.run)] == [saved]
    shutil.rmtree(case.run)
    second = case.start()
    assert case.finished(second) == peace
    assert second.lines()[0] == f"resumed {saved}"
    assert f"Fetched checkpoint-{saved}" in second.log()
    assert (case.bucket / "final" / "card.md").read_text() == "done"
    assert case.copied() == [saved, 60] and not list(case.bucket.glob(".lastcall/leaving*"))
    shutil.rmtree(case.run)
    assert case.finished(case.start()) == peace  # it is over, and stays so


def test_a_machine_that_dies_without_notice_costs_what_was_done_since_the_last_copy(
    nursery: Nursery, tmp_path: Path, server: Server, peace: str
) -> None:
    case = Case(nursery, tmp_path, server)
    periodic = {"LASTCALL_SAVE_STEPS": "5", "LASTCALL_SAVE_TOTAL_LIMIT": "2"}
    first = case.start(**periodic)
    until(lambda: len(case.copied()) >= 2 or first.poll() is not None, "two copies")
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, first.log()
    last = case.copied()[-1]
    assert last % 5 == 0
    shutil.rmtree(case.run)
    second = case.start(**periodic)
    assert case.finished(second) == peace
    assert second.lines()[0] == f"resumed {last}"
    assert len(case.copied()) == 2 and case.copied()[-1] == 60
    assert sorted(path.name for path in case.bucket.glob("checkpoint-*")) == sorted(
        f"checkpoint-{step}" for step in case.copied()
    )


def test_with_a_store_that_is_down_or_does_not_answer_the_process_leaves_in_its_grace(
    nursery: Nursery, tmp_path: Path
) -> None:
    grace = 5.0
    with contextlib.ExitStack() as stack:
        started = []
        for name, signum in (("down", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
            (tmp_path / name).mkdir()
            own = stack.enter_context(s3_server.served(tmp_path / name / "buckets"))
            case = Case(nursery, tmp_path / name, own)
            child = case.start(LASTCALL_GRACE_SECONDS=str(grace))
            started.append((case, child, own, signum))
        for _, child, own, signum in started:
            child.expect("at 7")
            own.process.send_signal(signum)
            child.send(signal.SIGTERM)
            stack.enter_context(killed_after(child, grace))
        for case, child, _, _ in started:
            assert child.wait() == chain.SAVED, child.log()
            assert (
                f"The newest checkpoint is only in {case.run}; it was not uploaded to "
                f"s3://runs/{case.folder.name}" in child.log()
            )
            assert len(chain.records(case.run)) == 1


def test_training_that_raises_ends_by_itself_although_a_copy_is_on_its_way_to_a_store_that_does_not_answer(
    nursery: Nursery, tmp_path: Path
) -> None:
    with s3_server.served(tmp_path / "buckets") as own:
        case = Case(nursery, tmp_path, own)
        child = case.start(
            LASTCALL_GRACE_SECONDS="2",
            LASTCALL_KILL_WAIT_SECONDS="0",
            LASTCALL_SAVE_STEPS="5",
            FAIL_AT="8",
            SLOW_STORE="1",
        )
        child.expect("waiting for failure")
        child.expect("waiting for store")
        own.process.send_signal(signal.SIGSTOP)
        (tmp_path / "store").touch()
        (tmp_path / "failure").touch()
        with killed_after(child, 30.0):
            assert child.wait() == 1, child.log()
        assert "ValueError: a bad batch" in child.log()
        assert "there was no time left" in child.log()


def test_a_store_that_cannot_be_reached_at_the_start_is_no_fresh_start(
    nursery: Nursery, tmp_path: Path, server: Server
) -> None:
    case = Case(nursery, tmp_path, server)
    child = case.start(LASTCALL_MIRROR="s3://nowhere/exp1")
    assert child.wait() == 78, child.log()
    assert "LASTCALL_MIRROR" in child.log() and "there is no such bucket" in child.log()
    child = case.start(AWS_S3_ENDPOINT="minio:9000")
    assert child.wait() == 78, child.log()
    assert "minio:9000" in child.log() and child.lines() == []


def test_the_next_one_waits_elsewhere_for_what_the_one_before_still_copies(
    nursery: Nursery, tmp_path: Path, server: Server, peace: str
) -> None:
    case = Case(nursery, tmp_path, server)
    first = case.caught_copying()
    second = case.start(tmp_path / "elsewhere")
    second.expect_log(f"Waiting for process {first.pid} on ")
    assert second.lines() == [] and case.copied() == []
    (tmp_path / "store").touch()
    assert first.wait() == chain.SAVED, first.log()
    assert case.finished(second) == peace
    assert second.lines()[0] == f"resumed {case.copied()[0]}"


def test_one_that_is_killed_while_it_copies_is_not_waited_for_and_what_it_has_left_is_removed(
    nursery: Nursery, tmp_path: Path, server: Server, peace: str
) -> None:
    case = Case(nursery, tmp_path, server)
    first = case.caught_copying()
    (left,) = case.bucket.glob("checkpoint-*")
    first.send(signal.SIGKILL)
    first.wait()
    shutil.rmtree(case.run)
    second = case.start()
    assert case.finished(second) == peace
    assert second.lines()[0] == "resumed None"
    assert not left.exists()
