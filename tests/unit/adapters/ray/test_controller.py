from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.preemption import PreemptionInfo
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from lastcall.adapters.ray import internals
from lastcall.adapters.ray.callback import JITCallback
from lastcall.adapters.ray.controller import Controller
from lastcall.adapters.ray.saves import uncommitted
from lastcall.adapters.ray.worker import connection
from lastcall.settings import JITCheckpointConfig

Joined = Callable[[int, int], connection.RankConnection]
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
    lines: list[connection.RankConnection] = []

    def join(rank: int, size: int) -> connection.RankConnection:
        lines.append(connection.connect(controller.next_incarnation(), rank, size))
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
    assert line.dead() == {0}


def test_an_incarnation_does_not_see_what_another_one_said(joined: Joined) -> None:
    joined(0, 2).agreement.tell("word", {})
    assert joined(0, 2).agreement.wait_for("word", 0.0) is None


def bug() -> WorkerStatus:
    return WorkerStatus(running=False, error=RuntimeError("bug in jit checkpoint"), preemption_info=NOTICE)


def test_b8_an_error_of_the_script_after_a_notice_is_charged_as_ever(controller: Controller) -> None:
    # it would be restarted for ever: each incarnation has the same notice, and the same error
    for _ in range(2):
        controller.next_incarnation()
        status = polled(controller, bug(), WorkerStatus(True, preemption_info=NOTICE))
        assert not status.has_preempted_worker()
        assert [str(error) for error in status.errors.values()] == ["bug in jit checkpoint"]


def test_b8_an_error_after_a_notice_that_was_answered_by_a_save_is_free_once(
    controller: Controller, joined: Joined
) -> None:
    joined(0, 2).agreement.tell(connection.SAVED, {})
    assert polled(controller, bug(), WorkerStatus(True)).has_preempted_worker()
    controller.next_incarnation()
    assert not polled(controller, bug(), WorkerStatus(True)).has_preempted_worker()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        ConnectionResetError("reset"),
    ],
)
def test_b8_what_a_rank_fails_of_whose_peer_was_taken_away_is_a_consequence(
    controller: Controller, error: Exception
) -> None:
    controller.next_incarnation()
    assert polled(controller, WorkerStatus(False, error=error, preemption_info=NOTICE)).has_preempted_worker()


@pytest.mark.parametrize("error", [None, RuntimeError("no")])
def test_b6_a_run_that_ended_well_leaves_no_state_for_the_next_one_of_its_name(
    controller: Controller, storage: Any, error: Exception | None
) -> None:
    uncommitted.leave_state(storage, ".lastcall/state-1", [None], {})
    folder = Path(storage.experiment_fs_path, ".lastcall", "state-1")
    folder.mkdir()
    run = SimpleNamespace(run_config=SimpleNamespace(storage_context=storage))
    callback = JITCallback({"enabled": True})
    callback._controller = Controller(JITCheckpointConfig(), run)
    callback._controller.start()
    callback.after_controller_finish(SimpleNamespace(error=error))
    kept = error is not None  # it may be submitted again
    assert (uncommitted.find_state(storage, None)[0] is not None, folder.exists()) == (kept, kept)
