"""Threads that nobody has to wait for."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from helpers.processes.forkserver import environment
from lastcall.storage import daemons
from lastcall.storage.daemons import Daemons

PATIENCE = 30.0


class Enough(Exception):
    pass


def test_all_is_done_and_the_results_come_in_order() -> None:
    assert daemons.at_once(lambda number: number * number, range(20), 4, lambda: None) == [
        n * n for n in range(20)
    ]
    assert daemons.at_once(lambda number: number, [], 4, lambda: None) == []


def test_no_more_are_at_work_than_asked_for_and_that_many_are() -> None:
    meeting = threading.Barrier(3)
    names = daemons.at_once(
        lambda _: (meeting.wait(PATIENCE), threading.current_thread().name)[0], range(9), 3, lambda: None
    )
    assert sorted(names) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_first_error_is_the_end_and_what_hangs_is_not_waited_for() -> None:
    free = threading.Event()

    def work(number: int) -> None:
        if number:
            raise Enough
        free.wait(PATIENCE)

    with pytest.raises(Enough):
        daemons.at_once(work, range(2), 2, lambda: None)
    assert not free.is_set()
    free.set()


def test_a_check_that_raises_is_the_end_and_what_has_not_begun_does_not_begin() -> None:
    begun, free = threading.Event(), threading.Event()
    seen: list[int] = []

    def work(number: int) -> None:
        seen.append(number)
        begun.set()
        free.wait(PATIENCE)

    def check() -> None:
        if begun.is_set():
            raise Enough

    with pytest.raises(Enough):
        daemons.at_once(work, range(5), 1, check)
    free.set()
    assert seen == [0]


def test_an_executor_is_left_when_its_work_is_done() -> None:
    with Daemons(2) as pool:
        found = [pool.submit(pow, 2, number) for number in range(5)]
    assert [future.result() for future in found] == [1, 2, 4, 8, 16]
    assert all(not thread.is_alive() for thread in pool._threads)


def test_a_process_does_not_wait_for_them_at_its_end() -> None:
    script = (
        "import threading; from lastcall.storage.daemons import Daemons; "
        "Daemons(1).submit(threading.Event().wait)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), timeout=PATIENCE)
    assert done.returncode == 0
