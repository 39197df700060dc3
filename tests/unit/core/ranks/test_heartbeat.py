from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from lastcall import clock, errors, testing
from lastcall.core.process import registry
from lastcall.core.process.identity import Process
from lastcall.core.ranks.heartbeat import (
    Beat,
    Diagnosis,
    Heartbeat,
    HeartbeatThread,
    Monitor,
    Peers,
    Progress,
    judge,
)
from lastcall.core.store import memory

HERE = "this host"


class Ranks:
    """Ranks that are watched by hand: every look is three seconds after the one before, every living rank
    beats in between."""

    def __init__(self, size: int, hang_seconds: float = 30.0) -> None:
        self.progress = Progress(size, hang_seconds)
        self.beats = {rank: Beat(1, 0) for rank in range(size)}
        self.now = 500.0

    def look(self, *, frozen: tuple[int, ...] = (), later: float = 3.0, **said: object) -> Diagnosis | None:
        """All but the frozen say this."""
        self.now += later
        for rank, beat in self.beats.items():
            if rank not in frozen:
                self.beats[rank] = Beat(**{**vars(beat), **said, "beat": beat.beat + 1})
        self.progress.take(self.beats, self.now)
        return judge(self.progress, self.now, HERE)

    def says(self, rank: int, **said: object) -> None:
        self.beats[rank] = Beat(**{**vars(self.beats[rank]), **said})

    def train(self, looks: int = 3) -> None:
        """A step a look."""
        for _ in range(looks):
            assert self.look(step=self.beats[0].step + 1) is None

    def looks_until_found(self, most: int, **how: object) -> tuple[int, Diagnosis]:
        for number in range(1, most + 1):
            if (finding := self.look(**how)) is not None:  # type: ignore[arg-type]
                return number, finding
        raise AssertionError(f"nothing was found in {most} looks")


# ---- what is found -----------------------------------------------------------------------------------------


def test_nothing_is_found_while_all_make_progress() -> None:
    Ranks(4).train(40)


def test_a_rank_without_a_pulse_is_frozen_once_nobody_makes_progress() -> None:
    ranks = Ranks(4)
    ranks.train()
    looks, finding = ranks.looks_until_found(20, frozen=(2,))
    assert (finding.kind, finding.ranks) == ("frozen", (2,))
    assert looks * 3 >= 30
    assert finding.because == "rank 2 sent no heartbeat for 30 s, and no rank makes progress"


def test_where_all_are_alive_the_lowest_step_tells_who_is_stuck() -> None:
    ranks = Ranks(3)
    ranks.train()
    ranks.says(1, step=ranks.beats[1].step - 1)
    _, finding = ranks.looks_until_found(20)
    assert (finding.kind, finding.ranks) == ("stuck", (1,))
    assert "rank 1 stopped at step 2, others reached 3" in finding.because


def test_ranks_that_look_alike_cannot_be_told_from_each_other() -> None:
    ranks = Ranks(3)
    ranks.train()
    _, finding = ranks.looks_until_found(20)
    assert (finding.kind, finding.ranks) == ("stuck", ())
    assert "the cause cannot be told from its victims" in finding.because


def test_a_silent_rank_whose_peers_go_on_is_no_hang() -> None:
    ranks = Ranks(3)
    ranks.train()
    findings = [ranks.look(frozen=(1,), step=ranks.beats[0].step + 1) for _ in range(30)]
    assert {finding.kind for finding in findings if finding is not None} == {"silent"}


def test_a_failure_is_found_at_once_and_told_with_its_words() -> None:
    ranks = Ranks(3)
    ranks.says(2, failed="ValueError: bad batch")
    finding = ranks.look()
    assert finding is not None
    assert (finding.kind, finding.ranks) == ("dead", (2,))
    assert finding.because == "the training of rank 2 failed; rank 2: ValueError: bad batch"


def test_a_process_that_is_gone_is_found_at_once_on_the_same_host_only() -> None:
    ranks = Ranks(3)
    ranks.says(1, pid=2**22 + 1, started=7, host=HERE)
    ranks.says(2, pid=2**22 + 1, started=7, host="another host")
    finding = ranks.look()
    assert finding is not None
    assert (finding.kind, finding.ranks, finding.because) == ("dead", (1,), "the process of rank 1 is gone")


def test_a_rank_that_finished_may_be_silent_or_gone() -> None:
    ranks = Ranks(3)
    ranks.train()
    ranks.says(1, finished=True, pid=2**22 + 1, started=7, host=HERE)
    for _ in range(30):
        assert ranks.look(frozen=(1,), step=ranks.beats[0].step + 1) is None


# ---- what is no hang ---------------------------------------------------------------------------------------


def test_a_first_step_may_take_minutes() -> None:
    ranks = Ranks(2)
    for _ in range(100):  # 300 s, with a pulse
        assert ranks.look() is None
    assert ranks.look(step=1) is None
    for _ in range(100):
        assert ranks.look() is None


@pytest.mark.parametrize("steps", [0, 1])
def test_c4_a_rank_that_freezes_in_its_first_steps_is_found(steps: int) -> None:
    """C4: nobody knows how long a step takes, but a rank that lives has a pulse."""
    ranks = Ranks(2)
    assert ranks.look(step=steps) is None
    looks = 0
    while (finding := ranks.look(frozen=(1,))) is None:
        looks += 1
        assert looks < 100
    assert finding.kind == "frozen" and finding.ranks == (1,) and looks * 3.0 >= 4 * 30.0 - 6.0


def test_c4_ranks_that_never_complete_a_first_step_are_told_of_in_the_end() -> None:
    ranks = Ranks(2)
    findings = [ranks.look() for _ in range(450)]  # 1350 s
    assert [finding.kind for finding in findings if finding is not None][:1] == ["stuck"]


def test_long_steps_raise_the_threshold() -> None:
    ranks = Ranks(2)
    for step in (1, 2, 3):
        for _ in range(3):
            assert ranks.look() is None
        assert ranks.look(step=step) is None
    assert ranks.progress.threshold == 120.0
    looks, finding = ranks.looks_until_found(50)
    assert finding.kind == "stuck"
    assert looks * 3 >= 120


def test_the_first_step_does_not_count_as_usual() -> None:
    ranks = Ranks(2)
    for _ in range(100):
        ranks.look()
    ranks.train(5)
    assert ranks.progress.threshold == 30.0


def test_the_threshold_can_be_set() -> None:
    ranks = Ranks(2, hang_seconds=90.0)
    ranks.train()
    looks, _ = ranks.looks_until_found(50)
    assert looks == 30


def test_a_rank_that_is_busy_excuses_all_that_wait_for_it() -> None:
    ranks = Ranks(3)
    ranks.train()
    for _ in range(50):
        ranks.says(0, busy="evaluating")
        assert ranks.look() is None
    ranks.says(0, busy="")
    assert ranks.look() is None
    looks, finding = ranks.looks_until_found(20)
    assert finding.kind == "stuck"
    assert looks * 3 >= 27


def test_a_rank_that_froze_while_it_was_busy_is_found() -> None:
    ranks = Ranks(3)
    ranks.train()
    ranks.says(0, busy="evaluating")
    ranks.look()
    findings = [ranks.look(frozen=(0,)) for _ in range(40)]
    kinds = [finding.kind for finding in findings if finding is not None]
    assert kinds[0] == "silent" and kinds[-1] == "frozen"
    assert {finding.ranks for finding in findings if finding is not None} == {(0,)}


def test_a_watch_that_was_frozen_itself_begins_anew() -> None:
    ranks = Ranks(3)
    ranks.train()
    assert ranks.look(frozen=(0, 1, 2), later=3600.0) is None
    assert ranks.look() is None
    ranks.train()


# ---- pulses through a store --------------------------------------------------------------------------------


def test_a_watch_reads_the_pulses_of_all_ranks() -> None:
    store, still = memory.MemoryStore(), testing.FakeClock()
    pulses = [Heartbeat(store, rank) for rank in range(3)]
    watch = Monitor(store.clone(), 0, 3, still)
    for pulse in pulses:
        pulse.beat(4)
    assert watch.look() is None
    assert {seen.beat.step for seen in watch.progress.ranks.values()} == {4}
    pulses[1].fail("KeyError: 'x'")
    pulses[1].beat(4)
    finding = watch.look()
    assert finding is not None
    assert (finding.kind, finding.ranks) == ("dead", (1,))
    pulses[1].finish()
    assert watch.look() is None


def test_the_two_lowest_ranks_watch() -> None:
    store = memory.MemoryStore()
    assert [Monitor(store, rank, 4, clock.Clock()).on_duty for rank in range(4)] == [True, True, False, False]


def test_a_pulse_without_a_store_is_silent() -> None:
    store = memory.MemoryStore()
    pulse = Heartbeat(store, 0)
    store.lose()
    pulse.beat(1)
    pulse.fail("why")
    with pytest.raises(errors.StoreLost):
        Monitor(store, 0, 1, clock.Clock()).look()


@pytest.mark.parametrize(
    "garbage", [None, b"", b"{}", b"7", b'{"beat": "1"}', b'{"beat": 1, "odd": 2}', b'{"beat": 1, "busy": 3}']
)
def test_what_is_no_beat_is_silence(garbage: bytes | None) -> None:
    assert Beat.from_bytes(garbage) is None


def test_a_beat_comes_back_from_its_bytes() -> None:
    beat = Beat(3, 7, HERE, 12, 34, "saving", "why", True)
    assert Beat.from_bytes(beat.to_bytes()) == beat


def test_a_heart_beats_until_it_is_closed() -> None:
    store = memory.MemoryStore()
    heart = HeartbeatThread(Heartbeat(store, 0), None, lambda: (5, "evaluating"), lambda finding: None)
    heart.start()
    beat = Beat.from_bytes(store.get("pulse/0", 60))
    heart.close()
    assert beat is not None
    assert (beat.step, beat.busy, beat.pid) == (5, "evaluating", os.getpid())
    assert not heart._thread.is_alive()


def test_a_finding_is_told_once_until_it_changes() -> None:
    store, found = memory.MemoryStore(), list[Diagnosis]()
    pulses = [Heartbeat(store, rank) for rank in range(2)]
    heart = HeartbeatThread(
        pulses[0], Monitor(store.clone(), 0, 2, testing.FakeClock()), lambda: (0, ""), found.append
    )
    pulses[1].fail("first")
    heart.look()
    heart.look()
    assert [finding.ranks for finding in found] == [(1,)]
    pulses[0].fail("second")
    heart.look()
    assert [finding.ranks for finding in found] == [(1,), (0, 1)]


def test_a_heart_whose_store_is_lost_goes_on_without_a_watch(caplog: pytest.LogCaptureFixture) -> None:
    store = memory.MemoryStore()
    heart = HeartbeatThread(
        Heartbeat(store, 0),
        Monitor(store.clone(), 0, 2, clock.Clock()),
        lambda: (0, ""),
        lambda finding: None,
    )
    store.lose()
    heart.look()
    assert "no longer monitored" in caplog.text
    heart.start()
    heart.close()


# ---- peers of one host -------------------------------------------------------------------------------------


def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])


def process_of(pid: int) -> Process:
    return Process(Process.own().host, pid, registry.process_start(pid) or 0)


def test_a_killed_peer_is_gone_before_anybody_has_collected_it() -> None:
    store, own = memory.MemoryStore(), Process.own()
    with child() as first, child() as second:
        Peers.register(store, 0, own)
        Peers.register(store, 1, process_of(first.pid))
        Peers.register(store, 2, process_of(second.pid))
        Peers.register(store, 3, Process("another host", first.pid, 1))
        peers = Peers.of_host(store, own)
        assert sorted(peers.table) == [1, 2]
        assert peers.gone() == set()
        first.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert peers.gone() == {1}
        second.kill()


def test_a_peer_that_cannot_be_seen_from_the_start_is_not_judged() -> None:
    store, own = memory.MemoryStore(), Process.own()
    Peers.register(store, 1, Process(own.host, 2**22 + 1, 7))
    store.set(f"host/{own.host}/2", b"garbage")
    store.add(f"host/{own.host}", 1)
    assert Peers.of_host(store, own).table == {}


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    own = Process.own()
    assert not own.gone(own.host)
    assert Process(own.host, own.pid, own.started + 1).gone(own.host)
    assert not Process(own.host, own.pid, own.started + 1).gone("another host")
    assert not Process("", own.pid, own.started + 1).gone("")


def test_a_failure_is_said_from_another_thread_than_the_beats() -> None:
    store = memory.MemoryStore()
    pulse = Heartbeat(store, 0)
    threads = [threading.Thread(target=pulse.beat, args=(step,)) for step in range(8)]
    threads.insert(4, threading.Thread(target=pulse.fail, args=("why",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    beat = Beat.from_bytes(store.get("pulse/0", 0))
    assert beat is not None
    assert (beat.failed, beat.beat) == ("why", 9)
