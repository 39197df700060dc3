from __future__ import annotations

import threading
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from lastcall.adapters.ray.worker.steps import Boundary

PATIENCE = 30.0


def optimizer() -> torch.optim.Optimizer:
    found = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    found.param_groups[0]["params"][0].grad = torch.zeros(1)
    return found


class Arrivals:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType) -> None:
        self.count += 1


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


@pytest.fixture
def boundary(arrivals: Arrivals) -> Iterator[Boundary]:
    boundary = Boundary(arrivals)
    boundary.install()
    yield boundary
    boundary.remove()


def test_every_step_is_counted_and_only_the_first_one_is_told_while_it_is_quiet(
    boundary: Boundary, arrivals: Arrivals
) -> None:
    one = optimizer()
    for _ in range(5):
        one.step()
    assert (boundary.steps, arrivals.count) == (5, 1)


def test_a_held_thread_stops_after_its_next_step_and_not_before(
    boundary: Boundary, arrivals: Arrivals
) -> None:
    one = optimizer()
    one.step()
    assert boundary.hold() == 1
    thread = threading.Thread(target=one.step)
    thread.start()
    until(lambda: boundary.steps == 2)
    assert thread.is_alive() and arrivals.count == 1
    boundary.release()
    thread.join(PATIENCE)
    assert not thread.is_alive() and arrivals.count == 2


def test_a_step_that_hold_does_not_count_is_one_that_stops(boundary: Boundary) -> None:
    """Whatever the two threads do in whatever order: no step passes that the agreement does not know of."""
    one, passed = optimizer(), threading.Event()

    def train() -> None:
        while not passed.is_set():
            one.step()

    thread = threading.Thread(target=train)
    thread.start()
    until(lambda: boundary.steps > 100)
    counted = boundary.hold()
    until(lambda: boundary.steps == counted + 1)
    passed.set()
    boundary.release()
    thread.join(PATIENCE)
    assert boundary.steps == counted + 1


def test_what_comes_before_a_pass_comes_before_its_first_optimizer_only(boundary: Boundary) -> None:
    one, other, seen = optimizer(), optimizer(), []
    one.step()
    boundary.before = lambda frame: seen.append(boundary.steps)
    other.step()
    one.step()
    other.step()
    assert seen == [2]


def test_a_loop_without_an_optimizer_steps_with_its_reports(boundary: Boundary, arrivals: Arrivals) -> None:
    frame = next(iter(__import__("sys")._current_frames().values()))
    boundary.passed(frame)
    boundary.passed(frame)
    assert (boundary.steps, arrivals.count, boundary.optimizers) == (2, 1, False)


def test_removing_it_lets_a_held_thread_go(boundary: Boundary) -> None:
    one = optimizer()
    boundary.hold()
    thread = threading.Thread(target=one.step)
    thread.start()
    until(lambda: boundary.steps == 1)
    boundary.remove()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def until(condition: object) -> None:
    assert callable(condition)
    done = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not come to be")


def test_b7_a_step_by_which_torch_makes_the_state_of_an_optimizer_is_none_of_training(
    boundary: Boundary, arrivals: Arrivals
) -> None:
    from torch.distributed.checkpoint import state_dict

    model = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    state_dict.get_state_dict(model, adam)  # as scripts do that load by DCP's recipe, before their loop
    assert (boundary.steps, arrivals.count, boundary.optimizers) == (1, 0, False)
    adam.step()
    assert (boundary.steps, arrivals.count, boundary.optimizers) == (2, 1, True)


def test_b7_a_step_outside_of_a_loop_is_followed_by_another_look(
    boundary: Boundary, arrivals: Arrivals
) -> None:
    one = optimizer()
    one.step()
    boundary.curious = True  # what arrived there was not the training loop
    one.step()
    one.step()
    assert (boundary.steps, arrivals.count) == (3, 2)
