from __future__ import annotations

import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.core.session_report import Reported
from lastcall.core.progress import page
from lastcall.core.progress.page import MetricsPage

NUMBERS = {"progressPercentage": int, "estimatedRemainingSeconds": int, "currentStep": int, "totalSteps": int,
           "currentEpoch": float, "totalEpochs": int, "trainMetrics": dict, "evalMetrics": dict}  # fmt: skip


class Case(Reported):
    """A session as far as the page knows it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(folder)
        self.page = MetricsPage(port, self.report)

    def start(self, resumed: str | None = None, incarnation: int = 1) -> Case:
        return self.event("start", incarnation=incarnation, resumed=resumed, seconds=0.1)

    def committed(self, step: int, save: str) -> Case:
        return self.event(
            "committed",
            save=save,
            step=step,
            exact=True,
            because="",
            seconds=0.5,
            written=9,
            path=f"checkpoint-{step}",
        )

    def said(self) -> dict[str, Any]:
        """The document, as a strict reader takes it."""

        def refuse(constant: str) -> object:
            raise AssertionError(f"{constant} is not JSON")

        said: dict[str, Any] = json.loads(json.dumps(self.page.report.document()), parse_constant=refuse)
        for name, kind in NUMBERS.items():  # what Go would refuse
            assert (
                said[name] is None or type(said[name]) is kind or (kind is float and type(said[name]) is int)
            ), (name, said[name])
        return said


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    case = Case(tmp_path)
    yield case
    case.page.close()


def get(case: Case, path: str = "/metrics", method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{case.page.port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


# ---- what is said ------------------------------------------------------------------------------------------


def test_the_fields_are_those_that_the_controller_reads(case: Case) -> None:
    case.progress.total_epochs = 3.0
    case.start().at(10, 0.15, {"loss": 2.5, "learning_rate": 1e-4}).at(
        20, 0.3, None, {"eval_loss": 3.0}, seconds=10.0
    )
    said = case.said()
    assert {name: said[name] for name in NUMBERS} == {
        "progressPercentage": 10,
        "estimatedRemainingSeconds": 180,
        "currentStep": 20,
        "totalSteps": 200,
        "currentEpoch": 0.3,
        "totalEpochs": 3,
        "trainMetrics": {"loss": 2.5, "learning_rate": 1e-4},
        "evalMetrics": {"eval_loss": 3.0},
    }
    assert (said["steps_per_second"], said["state"], said["incarnation"], said["resumed_from"]) == (
        1.0,
        "running",
        1,
        None,
    )


def test_before_the_first_report_a_resumed_run_says_where_it_is(case: Case) -> None:
    case.progress.where = lambda: 50
    said = case.start("checkpoint-50", 2).said()
    assert (said["currentStep"], said["progressPercentage"], said["estimatedRemainingSeconds"]) == (
        50,
        25,
        None,
    )
    assert (said["resumed_from"], said["incarnation"], said["trainMetrics"]) == ("checkpoint-50", 2, {})


def test_before_the_start_there_is_little_to_say(case: Case) -> None:
    said = case.said()
    assert (said["state"], said["currentStep"], said["progressPercentage"], said["totalEpochs"]) == (
        "starting",
        None,
        None,
        None,
    )


def test_the_first_step_of_a_run_is_no_percent_and_not_nothing(case: Case) -> None:
    assert case.start().at(0).said()["progressPercentage"] == 0


def test_the_time_left_runs_down_and_never_to_nothing(case: Case) -> None:
    case.start().at(10).at(20, seconds=10.0)
    case.clock.advance(100.0)
    assert case.said()["estimatedRemainingSeconds"] == 80
    case.clock.advance(1000.0)
    assert case.said()["estimatedRemainingSeconds"] == 1


def test_a_run_at_its_last_step_is_complete_only_when_it_has_finished(case: Case) -> None:
    case.start().at(100).at(200)
    said = case.said()
    assert (said["progressPercentage"], said["estimatedRemainingSeconds"]) == (99, 1)
    said = case.committed(200, "final").event("stop", outcome="finished", step=200).said()
    assert (said["progressPercentage"], said["estimatedRemainingSeconds"], said["state"]) == (
        100,
        0,
        "finished",
    )


def test_a_run_that_stopped_early_has_finished_at_its_step(case: Case) -> None:
    said = case.start().at(50).event("stop", outcome="finished", step=50).said()
    assert (said["progressPercentage"], said["estimatedRemainingSeconds"], said["currentStep"]) == (25, 0, 50)


def test_a_preempted_run_stays_at_its_step(case: Case) -> None:
    case.start().at(10).at(28).event("notice", source="signal", reason="SIGTERM", deadline_in=30.0)
    assert case.said()["estimatedRemainingSeconds"] is None  # nobody knows when it comes back
    assert case.event("save-begins", save="jit", step=28, bytes=9).said()["state"] == "saving"
    assert case.committed(28, "jit").said()["state"] == "saved"
    said = case.event("stop", outcome="saved", step=28).said()
    assert (said["progressPercentage"], said["estimatedRemainingSeconds"], said["state"]) == (
        14,
        None,
        "saved",
    )
    assert said["checkpoint"] == {
        "path": "checkpoint-28",
        "step": 28,
        "kind": "jit",
        "exact": True,
        "at": case.clock.wall(),
    }


def test_a_save_without_a_notice_and_one_after_a_hang_leave_the_run_running(case: Case) -> None:
    case.start().at(10).at(20).event("save-begins", save="periodic", step=20, bytes=9)
    assert (case.said()["state"], case.said()["estimatedRemainingSeconds"]) == ("saving", 18)
    assert case.committed(20, "periodic").said()["state"] == "running"
    assert (
        case.event("save-begins", save="manual", step=20, bytes=9)
        .event("not-saved", because="full")
        .said()["state"]
        == "running"
    )
    case.event("notice", source="hang", reason="rank 1 stands still").committed(20, "survivors")
    assert (case.said()["state"], case.said()["notice"], case.said()["estimatedRemainingSeconds"]) == (
        "running",
        None,
        18,
    )


@pytest.mark.parametrize(
    ("outcome", "state"), [("failed", "failed"), ("not saved", "not saved"), (None, "failed")]
)
def test_a_run_that_ended_badly_says_so(case: Case, outcome: str | None, state: str) -> None:
    said = case.start().at(10).at(20).event("stop", outcome=outcome, step=20).said()
    assert (said["state"], said["progressPercentage"], said["estimatedRemainingSeconds"]) == (state, 10, None)


def test_without_a_number_of_steps_the_epochs_tell_how_far_it_is(case: Case) -> None:
    case.progress.total = None
    case.start().at(10, 0.5)
    assert case.said()["progressPercentage"] is None
    case.progress.total_epochs = 2.5
    said = case.said()
    assert (said["progressPercentage"], said["totalEpochs"], said["totalSteps"]) == (20, 3, None)
    case.progress.total_epochs = None
    assert case.event("stop", outcome="finished", step=10).said()["progressPercentage"] == 100


@pytest.mark.parametrize("step", range(0, 200, 7))
def test_the_percentage_is_whole_and_never_ahead(case: Case, step: int) -> None:
    assert case.start().at(step).said()["progressPercentage"] == step * 100 // 200


def test_numbers_that_are_none_become_null_and_metrics_are_sorted_by_their_names(case: Case) -> None:
    metrics = {
        "loss": float("nan"),
        "grad_norm": float("inf"),
        "eval_loss": -float("inf"),
        "phase": "warm",
        "train_samples_per_second": 4,
    }
    said = case.start().at(10, None, metrics, {"accuracy": 0.5}).said()
    assert said["trainMetrics"] == {
        "loss": None,
        "grad_norm": None,
        "phase": "warm",
        "train_samples_per_second": 4.0,
        "throughput_samples_sec": 4.0,
    }
    assert said["evalMetrics"] == {"eval_loss": None, "accuracy": 0.5}
    assert json.loads(case.progress.path.read_text())["metrics"]["loss"] == "nan"  # for people


# ---- how it is served --------------------------------------------------------------------------------------


def test_two_paths_are_answered_and_nothing_else(case: Case) -> None:
    case.start().at(10)
    case.page.open()
    status, body = get(case)
    assert status == 200 and json.loads(body) == case.said()
    assert get(case, "/") == get(case, "/metrics?x=1") == (status, body)
    assert get(case, "/etc/passwd")[0] == get(case, "/metrics/")[0] == 404
    assert get(case, method="POST")[0] == get(case, method="DELETE")[0] == 501


def test_a_port_in_use_is_a_warning(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case.page.open()
    other = Case(tmp_path / "other", case.page.port)
    other.page.open()
    other.page.close()
    assert f"Could not serve progress on port {case.page.port}" in caplog.text
    assert get(case)[0] == 200


def test_the_port_is_free_again_at_once_and_the_thread_is_gone(case: Case, tmp_path: Path) -> None:
    case.page.open()
    assert get(case)[0] == 200
    case.page.close()
    assert "lastcall-page" not in [thread.name for thread in threading.enumerate()]
    again = Case(tmp_path / "again", case.page.port)
    again.page.open()
    try:
        assert again.page.port == case.page.port and get(again)[0] == 200
    finally:
        again.page.close()


def test_clients_that_say_nothing_hold_up_nobody(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page._Handler, "timeout", 0.3)
    case.page.open()
    silent = [socket.create_connection(("127.0.0.1", case.page.port)) for _ in range(page._AT_ONCE - 1)]
    try:
        assert get(case)[0] == 200
        silent += [socket.create_connection(("127.0.0.1", case.page.port)) for _ in range(2 * page._AT_ONCE)]
        for one in silent:
            one.settimeout(30)
            assert one.recv(100) == b""  # sent away, some at once and some after a while
        assert get(case)[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_fault_of_ours_is_no_answer_and_no_end(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    case.page.open()
    case.progress.where = lambda: 1 // 0
    with pytest.raises(OSError):
        get(case)
    case.progress.where = None
    assert get(case)[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_port(case: Case, tmp_path: Path) -> None:
    case.page.open()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        os.close(reading)
        case.page.close()
        again = Case(tmp_path / "again", case.page.port)
        again.page.open()
        again.page.close()
        assert again.page._thread is not None
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
