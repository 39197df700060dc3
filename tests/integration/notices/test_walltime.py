from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.processes.forkserver import PATIENCE, until
from lastcall import clock as clocks
from lastcall.notices import polling, walltime
from lastcall.types import Notice

JOB = (
    "JobId=71 JobName=train UserId=me(1000) JobState=RUNNING Reason=None Requeue=1 RunTime=00:10:00 "
    "TimeLimit=01:00:00 "
    "SubmitTime=2024-05-01T10:00:00 StartTime=2024-05-01T11:00:00 EndTime={end} Deadline=N/A Partition=gpu\n"
)


class Scontrol:
    """A real program that prints what a file says, and notes how it was called."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path, self._out, self._calls = folder / "scontrol", folder / "out", folder / "calls"
        self.path.write_text(f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $*" >> {self._calls}\n. {self._out}\n')
        self.path.chmod(0o755)
        self.says(0)

    def says(self, end: float | str) -> None:
        self.does(f"printf '%s' '{JOB.format(end=end if isinstance(end, str) else round(end))}'")

    def does(self, shell: str) -> None:
        fresh = self._out.with_suffix(".new")
        fresh.write_text(shell + "\n")
        fresh.replace(self._out)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def environ(self, **more: str) -> dict[str, str]:
        return {"PATH": f"{self.path.parent}:/usr/bin:/bin", "SLURM_JOB_ID": "71", **more}


@pytest.fixture
def scontrol(tmp_path: Path) -> Scontrol:
    return Scontrol(tmp_path / "bin")


class Turned(clocks.Clock):
    """A clock whose time of day can be set."""

    ahead = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead


def slurm(
    environ: Mapping[str, str], lead: float = 120.0, clock: clocks.Clock | None = None
) -> walltime.Slurm:
    source = walltime.Slurm.of_environment(environ, lead, clock)
    assert source is not None
    return source


@contextmanager
def listening(source: walltime.Slurm) -> Iterator[queue.Queue[Notice]]:
    heard: queue.Queue[Notice] = queue.Queue()
    source.start(heard.put)
    try:
        yield heard
    finally:
        source.stop()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_outside_of_an_allocation_there_is_no_source(scontrol: Scontrol) -> None:
    assert walltime.Slurm.of_environment({}) is None
    assert walltime.Slurm.of_environment(scontrol.environ(SLURM_JOB_ID="")) is None
    assert scontrol.calls == []


def test_without_a_variable_and_without_scontrol_there_is_no_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "lastcall"):
        assert walltime.Slurm.of_environment({"SLURM_JOB_ID": "71", "PATH": str(tmp_path)}) is None
    assert "SLURM_JOB_END_TIME" in caplog.text and "--signal=B:TERM@120" in caplog.text


def test_the_variable_alone_is_enough_and_the_deadline_is_the_end(tmp_path: Path) -> None:
    end = int(time.time()) + 200
    environ = {"SLURM_JOB_ID": "71", "PATH": str(tmp_path), "SLURM_JOB_END_TIME": str(end)}
    source = slurm(environ, lead=60.0, clock=(clock := Turned()))
    assert 0 < source.look() <= 140.0
    clock.ahead = 170.0
    with listening(source) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert notice.source == "slurm" and notice.reason == f"the allocation ends at {polling.shown(end)}"
    assert notice.deadline is not None and notice.deadline - notice.at == pytest.approx(30.0, abs=5.0)


def test_the_notice_comes_by_itself_when_its_time_has_come(scontrol: Scontrol) -> None:
    scontrol.does(f"printf 'EndTime=%s' {time.time() + 4:.0f}")
    with listening(slurm(scontrol.environ(), lead=2.0)) as heard:
        notice = heard.get(timeout=PATIENCE)
    assert notice.deadline is not None and 0.0 < notice.deadline - notice.at <= 2.5


def test_scontrol_is_asked_for_this_job_in_seconds(scontrol: Scontrol) -> None:
    scontrol.says(time.time() + 3600)
    source = slurm(scontrol.environ())
    assert source.look() == 60.0
    assert scontrol.calls == ["%s show job 71 -o"]


def test_scontrol_knows_better_than_the_variable_which_is_never_renewed(scontrol: Scontrol) -> None:
    end = int(time.time()) + 7200
    scontrol.says(end)
    source = slurm(scontrol.environ(SLURM_JOB_END_TIME=str(int(time.time()) + 60)))
    assert source.look() == 60.0 and source.end == end


def test_a_limit_that_was_extended_meanwhile_is_seen_before_the_notice_is_given(scontrol: Scontrol) -> None:
    clock = Turned()
    scontrol.says(time.time() + 1000)
    source = slurm(scontrol.environ(), clock=clock)
    assert source.look() == 60.0
    clock.ahead = 900.0
    scontrol.says(time.time() + 5000)
    assert source.look() == 60.0


def test_a_job_without_a_limit_is_asked_about_again_later(scontrol: Scontrol) -> None:
    scontrol.says("Unknown")
    source = slurm(scontrol.environ())
    assert source.look() == 60.0 and source.end is None


def test_a_job_shorter_than_the_lead_keeps_half_of_its_time(
    scontrol: Scontrol, caplog: pytest.LogCaptureFixture
) -> None:
    scontrol.says(time.time() + 60)
    source = slurm(scontrol.environ(), lead=120.0)
    assert source.look() == pytest.approx(30.0, abs=2.0)
    source.look()
    assert len(warnings(caplog)) == 1 and "instead of 120 s" in warnings(caplog)[0]


@pytest.mark.parametrize(
    "shell", ["exit 1", "echo slurm_load_jobs error >&2; exit 1", "echo hello", "printf 'EndTime=later'"]
)
def test_an_scontrol_that_fails_is_warned_of_once_and_the_variable_still_holds(
    scontrol: Scontrol, shell: str, caplog: pytest.LogCaptureFixture
) -> None:
    scontrol.does(shell)
    end = int(time.time()) + 3600
    source = slurm(scontrol.environ(SLURM_JOB_END_TIME=str(end)))
    assert source.look() == source.look() == 60.0
    assert source.end == end and len(warnings(caplog)) == 1


def test_an_scontrol_that_hangs_is_ended(
    scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(walltime, "_SCONTROL_SECONDS", 0.2)
    scontrol.does("exec sleep 600")
    source = slurm(scontrol.environ(SLURM_JOB_END_TIME=str(int(time.time()) + 3600)))
    assert source.look() == 60.0
    assert "timed out" in warnings(caplog)[0]


def test_where_only_scontrol_could_know_a_failure_is_tried_again(
    scontrol: Scontrol, caplog: pytest.LogCaptureFixture
) -> None:
    scontrol.does("exit 1")
    source = slurm(scontrol.environ(), lead=120.0)
    source.interval = 0.01
    with caplog.at_level(logging.DEBUG, "lastcall"), listening(source) as heard:
        until(lambda: len(scontrol.calls) >= 3, "three questions")
        scontrol.says(time.time())
        assert heard.get(timeout=PATIENCE).source == "slurm"
    assert len([line for line in warnings(caplog) if "cannot be read from scontrol" in line]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EndTime=1714557600", 1714557600.0),
        (JOB.format(end="1714557600"), 1714557600.0),
        (JOB.format(end="Unknown"), None),
        (JOB.format(end="None"), None),
    ],
)
def test_the_end_is_read_from_the_answer_of_scontrol(text: str, expected: float | None) -> None:
    assert walltime.end_time(text) == (True, expected)


def test_local_time_is_understood_where_the_format_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert walltime.end_time(JOB.format(end="2024-05-01T06:00:00")) == (True, 1714557600.0)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "nothing", "SuspendTime=5", "EndTime=", "EndTime=tomorrow"])
def test_an_answer_without_an_end_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        walltime.end_time(text)
