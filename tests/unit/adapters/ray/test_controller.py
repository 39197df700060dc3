from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.preemption import PreemptionInfo
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from lastcall.adapters.ray import internals, meeting
from lastcall.adapters.ray.controller import Controller
from lastcall.settings import JITCheckpointConfig

Joined = Callable[[int, int], meeting.Line]
NOTICE = PreemptionInfo(None, {"node": [0]})


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    monkeypatch.setattr(internals, "address", lambda: "127.0.0.1")
    controller = Controller(JITCheckpointConfig())
    controller.start()
    yield controller
    controller.stop()


@pytest.fixture
def joined(controller: Controller) -> Iterator[Joined]:
    """A rank of the next incarnation."""
    lines: list[meeting.Line] = []

    def join(rank: int, size: int) -> meeting.Line:
        lines.append(meeting.connect(controller.next_incarnation(), rank, size))
        return lines[-1]

    yield join
    for line in lines:
        line.close()


def dead() -> WorkerStatus:
    return WorkerStatus(running=False, error=WorkerHealthCheckFailedError("gone", failure=ActorDiedError()))


def failed() -> WorkerStatus:
    return WorkerStatus(running=False, error=RuntimeError("Connection closed by peer"))


def polled(controller: Controller, *workers: WorkerStatus) -> WorkerGroupPollStatus:
    status = WorkerGroupPollStatus(dict(enumerate(workers)))
    controller.polled(status)
    return status


def test_a_death_after_a_notice_is_a_preemption(controller: Controller) -> None:
    controller.next_incarnation()
    assert polled(controller, dead(), WorkerStatus(True, preemption_info=NOTICE)).has_preempted_worker()


def test_a_death_out_of_the_blue_stays_a_failure(controller: Controller) -> None:
    controller.next_incarnation()
    assert not polled(controller, dead(), WorkerStatus(True)).has_preempted_worker()


def test_a_notice_that_only_the_dead_rank_knew_of_counts(controller: Controller, joined: Joined) -> None:
    line = joined(0, 2)
    line.agreement.announce({"rank": 0, "reason": "SIGTERM"})
    assert polled(controller, dead(), WorkerStatus(True)).has_preempted_worker()


def test_what_the_others_fail_of_after_a_notice_is_a_consequence_and_is_said(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    controller.next_incarnation()
    polled(controller, WorkerStatus(True, preemption_info=NOTICE), WorkerStatus(True, preemption_info=NOTICE))
    assert polled(controller, failed(), WorkerStatus(True)).has_preempted_worker()
    assert "Connection closed by peer" in caplog.text


def test_an_exception_of_the_script_without_a_notice_is_left_alone(controller: Controller) -> None:
    controller.next_incarnation()
    (error,) = polled(controller, failed()).errors.values()
    assert type(error) is RuntimeError


def test_a_notice_of_one_incarnation_says_nothing_of_the_next(controller: Controller) -> None:
    controller.next_incarnation()
    polled(controller, WorkerStatus(True, preemption_info=NOTICE))
    controller.next_incarnation()
    assert not polled(controller, dead()).has_preempted_worker()


def test_the_ranks_learn_who_is_dead_and_what_is_committed(controller: Controller, joined: Joined) -> None:
    line = joined(1, 3)
    polled(controller, dead(), WorkerStatus(True), WorkerStatus(True))
    controller.reported(None)
    controller.reported(SimpleNamespace(path="/storage/exp/checkpoint_1"))
    assert line.agreement.wait_for("committed/2", 30.0) == {"path": "/storage/exp/checkpoint_1"}
    assert line.agreement.wait_for("committed/1", 0.0) is None
    assert line.gone() == {0}


def test_an_incarnation_does_not_see_what_another_one_said(joined: Joined) -> None:
    joined(0, 2).agreement.tell("word", {})
    assert joined(0, 2).agreement.wait_for("word", 0.0) is None
