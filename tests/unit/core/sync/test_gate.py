from __future__ import annotations

import os
import threading
from collections.abc import Callable

from helpers.processes.scripts import eventually
from lastcall import clock, testing
from lastcall.core.sync.gate import Gate


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def far(real: clock.Clock) -> float:
    return real.now() + 60


def held(gate: Gate) -> Callable[[], bool]:
    """Whether a thread that entered is being held outside: it waits for the gate's event."""
    waiting = gate._opened._cond._waiters  # type: ignore[attr-defined]
    return lambda: len(waiting) > 0


def test_an_open_gate_lets_steps_pass_and_counts_them() -> None:
    gate = Gate()
    for _ in range(3):
        gate.enter()
        assert gate.depth == 1
        gate.leave()
    assert (gate.depth, gate.steps) == (0, 3)


def test_a_gate_closes_at_once_where_no_step_is_in_progress() -> None:
    gate, still = Gate(), testing.FakeClock()
    assert gate.close(still, still.now())
    assert gate.closed
    gate.open()
    assert not gate.closed


def test_closing_waits_for_the_step_in_progress() -> None:
    gate, real = Gate(), clock.Clock()
    gate.enter()
    answers: list[bool] = []
    closing = in_thread(lambda: answers.append(gate.close(real, far(real))))
    assert eventually(lambda: gate.closed)
    assert answers == []
    gate.leave()
    closing.join(60)
    assert answers == [True]
    assert gate.steps == 1


def test_the_next_step_is_kept_out_until_the_gate_opens() -> None:
    gate, real = Gate(), clock.Clock()
    assert gate.close(real, far(real))
    training = in_thread(lambda: (gate.enter(), gate.leave()) and None)
    assert eventually(held(gate))
    assert (gate.depth, gate.steps) == (0, 0)
    gate.open()
    training.join(60)
    assert (gate.depth, gate.steps) == (0, 1)


def test_a_close_that_times_out_leaves_the_gate_open() -> None:
    gate, still = Gate(), testing.FakeClock()
    gate.enter()
    until = still.now() + 0.01
    assert not gate.close(still, until)
    assert still.now() >= until
    assert not gate.closed
    gate.leave()
    gate.enter()
    gate.leave()
    assert (gate.depth, gate.steps) == (0, 2)


def test_a_step_inside_a_step_passes_a_gate_that_waits_for_the_outer_one() -> None:
    gate, real = Gate(), clock.Clock()
    gate.enter()
    answers: list[bool] = []
    closing = in_thread(lambda: answers.append(gate.close(real, far(real))))
    assert eventually(lambda: gate.closed)
    inner = in_thread(lambda: (gate.enter(), gate.leave()) and None)
    inner.join(30)
    assert not inner.is_alive()
    assert answers == []
    gate.leave()
    closing.join(60)
    assert answers == [True]
    assert (gate.depth, gate.steps) == (0, 2)


def test_nested_steps_count_until_the_outermost_ends() -> None:
    gate, still = Gate(), testing.FakeClock()
    gate.enter()
    gate.enter()
    gate.leave()
    assert not gate.close(still, still.now())
    gate.leave()
    assert gate.close(still, still.now())


def test_what_is_raised_while_a_step_is_held_leaves_the_gate_free() -> None:
    gate, real = Gate(), clock.Clock()

    class Leave(Exception):
        pass

    def leave() -> None:
        raise Leave

    gate.on_hold = leave
    assert gate.close(real, far(real))
    seen: list[BaseException] = []

    def train() -> None:
        try:
            gate.enter()
        except Leave as error:
            seen.append(error)

    training = in_thread(train)
    assert eventually(held(gate))
    gate.open()
    training.join(60)
    assert len(seen) == 1
    assert (gate.depth, gate.steps) == (0, 0)
    assert gate.close(real, real.now())


def test_a_gate_that_closes_again_while_a_held_step_wakes_holds_it_again() -> None:
    gate, real = Gate(), clock.Clock()
    closed_again: list[bool] = []

    def on_hold() -> None:
        if not closed_again:
            closed_again.append(gate.close(real, far(real)))  # a second rescue, at the worst moment

    gate.on_hold = on_hold
    assert gate.close(real, far(real))
    training = in_thread(lambda: (gate.enter(), gate.leave()) and None)
    assert eventually(held(gate))
    gate.open()
    assert eventually(lambda: closed_again == [True])
    assert eventually(held(gate))
    assert gate.steps == 0
    gate.open()
    training.join(60)
    assert not training.is_alive()
    assert (gate.depth, gate.steps) == (0, 1)


def test_no_step_overlaps_a_closed_gate_under_fire() -> None:
    gate, real = Gate(), clock.Clock()
    inside = [0]
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            gate.enter()
            inside[0] += 1
            inside[0] -= 1
            gate.leave()

    training = in_thread(train)
    for _ in range(300):
        assert gate.close(real, far(real))
        before = gate.steps
        assert inside[0] == 0
        assert gate.steps == before
        gate.open()
    stop.set()
    training.join(60)
    assert (gate.depth, inside[0]) == (0, 0)


def test_a_forked_child_finds_the_gate_open() -> None:
    gate = Gate()
    gate.shut()
    pid = os.fork()
    if pid == 0:
        gate.enter()
        gate.leave()
        os._exit(0 if gate.steps == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gate.closed
    gate.open()
    assert not gate.closed


def test_the_gate_opens_when_the_last_who_shut_it_opens_it() -> None:
    gate = Gate()
    gate.shut()
    gate.shut()
    gate.open()
    assert gate.closed
    gate.open()
    assert not gate.closed
