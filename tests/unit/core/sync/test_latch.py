from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from lastcall.core.sync.latch import Latch
from lastcall.types import Notice

FIRST = Notice("signal", "SIGTERM", at=10.0, deadline=40.0, signum=15)


def test_a_new_latch_holds_nothing() -> None:
    latch = Latch()
    assert latch.raised is False
    assert latch.notice is None
    assert latch.wait(0) is False


def test_the_first_notice_sticks() -> None:
    latch = Latch()
    assert latch.offer(FIRST) is True
    assert latch.raised is True
    assert latch.notice == FIRST
    assert latch.wait(0) is True


def test_the_same_notice_again_changes_nothing() -> None:
    latch = Latch()
    latch.offer(FIRST)
    assert latch.offer(FIRST) is False
    assert latch.notice == FIRST


@pytest.mark.parametrize("deadline", [40.0, 41.0, None])
def test_a_later_notice_never_gives_time_back(deadline: Any) -> None:
    latch = Latch()
    latch.offer(FIRST)
    assert latch.offer(Notice("file", "stop", at=20.0, deadline=deadline)) is False
    assert latch.notice == FIRST


@pytest.mark.parametrize("before", [40.0, None])
def test_a_later_notice_can_shorten_the_deadline_and_nothing_else(before: Any) -> None:
    latch = Latch()
    first = dataclasses.replace(FIRST, deadline=before)
    latch.offer(first)
    assert latch.offer(Notice("cloud", "spot", at=20.0, deadline=30.0, signum=2)) is True
    assert latch.notice == dataclasses.replace(first, deadline=30.0)


def test_a_waiting_thread_wakes_up_on_a_notice() -> None:
    latch = Latch()
    seen: list[Notice | None] = []
    thread = threading.Thread(target=lambda: (latch.wait(60), seen.append(latch.notice)))
    thread.start()
    latch.offer(FIRST)
    thread.join(60)
    assert seen == [FIRST]


def test_of_many_threads_exactly_one_is_first_and_the_earliest_deadline_wins() -> None:
    latch = Latch()
    barrier = threading.Barrier(8)
    seen: list[bool] = []

    def offer(number: int) -> None:
        barrier.wait()
        seen.append(latch.offer(Notice("test", str(number), at=0.0, deadline=100.0 - number)))

    threads = [threading.Thread(target=offer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(seen)
    assert latch.notice is not None
    assert latch.notice.deadline == 93.0


def test_its_truth_value_is_refused() -> None:
    with pytest.raises(TypeError, match=r"read \.raised"):
        bool(Latch())


def test_the_signal_that_follows_a_hook_is_the_one_that_an_unsaved_run_dies_of() -> None:
    latch = Latch()
    latch.offer(Notice("stop-file", "stop file /opt/lastcall/stop", at=10.0, deadline=40.0))
    assert latch.offer(Notice("signal", "SIGTERM", at=10.2, deadline=40.2, signum=15)) is False
    assert latch.notice == Notice(
        "stop-file", "stop file /opt/lastcall/stop", at=10.0, deadline=40.0, signum=15
    )
