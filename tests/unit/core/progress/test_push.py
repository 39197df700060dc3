from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.core.session_report import Reported
from helpers.kubeflow.status import Controller, metrics
from lastcall.core.progress.push import StatusPush, status_of
from lastcall.kube.webhook import certificates
from lastcall.settings import StatusServer


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller() as controller:
        yield controller


class Case(Reported):
    def __init__(self, folder: Path, url: str, ca_file: str | None = None) -> None:
        super().__init__(folder)
        self.token = folder / "token"
        self.token.write_text("secret\n")
        self.push = StatusPush(StatusServer(url, ca_file, str(self.token)), self.report, interval=0.01)


@pytest.fixture
def case(tmp_path: Path, controller: Controller) -> Iterator[Case]:
    case = Case(tmp_path, controller.url)
    yield case
    case.push.close()


def test_a_status_is_what_the_controller_reads(case: Case, controller: Controller) -> None:
    case.event("start", incarnation=2, resumed="checkpoint-90").at(100, 0.5, {"loss": 2.5}).at(
        110, 0.55, None, {"eval_loss": 3.0}
    )
    case.event(
        "committed",
        save="periodic",
        step=110,
        exact=True,
        because="",
        seconds=0.5,
        written=9,
        path="checkpoint-110",
    )
    case.push.open()
    controller.wait(lambda: controller.told)
    (status,) = controller.told[:1]
    # 90 steps, at the speed since the resume
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (55, 9)
    said = metrics(status)
    assert (said["current_step"], said["total_steps"], said["loss"], said["eval_loss"]) == (
        "110",
        "200",
        "2.5",
        "3.0",
    )
    assert (said["state"], said["resumed_from"]) == ("running", "checkpoint-90")
    assert (said["checkpoint_step"], said["checkpoint_kind"], said["incarnation"]) == (
        "110",
        "periodic",
        "2",
    ) and "notice" not in said
    assert status["lastUpdatedTime"].endswith("Z")
    assert controller.asked[0] == (
        "/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status",
        "Bearer secret",
    )


def test_a_preempted_run_is_neither_complete_nor_without_time(case: Case, controller: Controller) -> None:
    case.event("start", incarnation=1, resumed=None).at(10).at(28).event(
        "notice", source="signal", reason="SIGTERM"
    )
    case.event(
        "committed", save="jit", step=28, exact=True, because="", seconds=0.5, written=9, path="checkpoint-28"
    )
    case.event("stop", outcome="saved", step=28)
    case.push.open()
    case.push.close()
    last = controller.told[-1]
    assert last["progressPercentage"] == 14 and "estimatedRemainingSeconds" not in last
    assert (metrics(last)["state"], metrics(last)["notice"], metrics(last)["checkpoint_step"]) == (
        "saved",
        "SIGTERM",
        "28",
    )


def test_a_run_that_has_finished_says_so_in_its_last_word(case: Case, controller: Controller) -> None:
    case.event("start", incarnation=1, resumed=None).at(200)
    case.push.open()
    controller.wait(lambda: controller.told)
    case.event("stop", outcome="finished", step=200)
    case.push.close()
    last = controller.told[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"], metrics(last)["state"]) == (
        100,
        0,
        "finished",
    )


def test_what_has_been_said_is_not_said_again(case: Case, controller: Controller) -> None:
    case.event("start", incarnation=1, resumed=None).at(0)
    case.push.open()
    controller.wait(lambda: controller.told)
    for _ in range(20):  # turns of its thread
        case.push._closing.wait(0.01)
    case.push.close()
    assert len(controller.asked) == 1


@pytest.mark.parametrize("answers", [403, 500, 307])
def test_a_server_that_refuses_is_one_warning_and_asked_less_often(
    case: Case, controller: Controller, answers: int, caplog: pytest.LogCaptureFixture
) -> None:
    controller.answers = answers
    case.event("start", incarnation=1, resumed=None).at(1)
    case.push.open()
    controller.wait(lambda: len(controller.asked) == 3)
    assert case.push._pause() >= 0.04
    controller.answers = 200
    controller.wait(lambda: controller.told)
    case.push.close()
    # nobody takes our token there
    assert [path for path, _ in controller.asked if path == "/elsewhere"] == []
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert f"answered {answers}" in caplog.text and case.push._pause() == 0.01


def test_nobody_there_and_no_token_are_warnings_too(
    tmp_path: Path, controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(tmp_path, "http://127.0.0.1:9/x")
    case.push._tell()
    other = Case(tmp_path, controller.url)
    other.token.unlink()
    other.push._tell()
    assert caplog.text.count("Could not report progress to Kubeflow") == 2 and controller.asked == []


def test_too_many_metrics_are_cut_off_and_none_of_ours(case: Case) -> None:
    many = {f"metric_{number}": number for number in range(1000)} | {"state": "mine"}
    case.event("start", incarnation=1, resumed=None).at(10, None, many)
    status = status_of(case.report.document())
    said = metrics(status)
    assert len(said) == 256 and (said["state"], said["current_step"]) == ("running", "10")


def test_over_tls_only_the_authority_that_the_pod_was_given_is_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = certificates.authority()
    for name, pem in {"ca": authority.certificate, "other": certificates.authority().certificate}.items():
        (tmp_path / name).write_bytes(pem)
    pair = certificates.serving(authority, ["127.0.0.1"])
    (tmp_path / "serving").write_bytes(pair.certificate + pair.key)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "serving")
    with Controller(tls) as controller:
        Case(tmp_path, controller.url, str(tmp_path / "other")).push._tell()
        assert controller.asked == [] and "CERTIFICATE_VERIFY_FAILED" in caplog.text
        Case(tmp_path, controller.url, str(tmp_path / "ca")).push._tell()
        assert len(controller.told) == 1
