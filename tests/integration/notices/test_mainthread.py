"""Signals listened to from a side thread, while the main thread is anywhere."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.scripts import Script
from lastcall.notices import mainthread, signals
from lastcall.notices.signals import SignalListener

PRELUDE = """
import asyncio, ctypes, os, queue, select, signal, subprocess, sys, threading, time
from lastcall.notices import mainthread, signals
from lastcall.notices.signals import SignalListener

def say(*words):
    print(*words, flush=True)

libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)

def stuck():
    "Lock a mutex twice: a C call that no signal interrupts, and that ends when another thread says release()."
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def release():
    libc.pthread_mutex_unlock(mutex)

def busy():
    while True:
        pass

def read():
    os.dup2(os.pipe()[0], 0)
    input()

def left():
    "How things are: nothing of ours may be here after stop()."
    c_handler = mainthread._api.PyOS_getsig(signal.SIGURG)
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGURG), c_handler, len(os.listdir("/proc/self/fd"))

never = threading.Event()
"""  # noqa: E501
ASIDE = """
def aside():
    time.sleep(0.15)  # the main thread is where it shall be
    before, heard = left(), queue.Queue()
    listener = SignalListener(['SIGTERM'], lambda signum, count: heard.put(time.perf_counter()))
    began = time.perf_counter()
    listener.start()
    say('started', time.perf_counter() - began)
    sent = time.perf_counter()
    os.kill(os.getpid(), signal.SIGTERM)
    say('heard', heard.get() - sent)
    listener.rearm()
    listener.stop()
    say('same', left() == before, left(), before)
    if not WAIT:
        os._exit(0)
WAIT = False
thread = threading.Thread(target=aside)
thread.start()
"""
PLACES = {
    "Python": "busy()",
    "join": "thread.join()",
    "Event.wait": "never.wait()",
    "Queue.get": "queue.Queue().get()",
    "SimpleQueue.get": "queue.SimpleQueue().get()",
    "sleep": "time.sleep(1000)",
    "select": "select.select([], [], [])",
    "poll": "select.poll().poll()",
    "waitpid": "subprocess.run(['sleep', '1000'])",
    "asyncio": "asyncio.run(asyncio.sleep(1000))",
    "read": "read()",
    "the end": "",
}


def run(tmp_path: Path, body: str, **options: Any) -> Script:
    return Script(tmp_path, PRELUDE + body, **options)


@pytest.mark.parametrize("place", PLACES)
def test_a_side_thread_starts_and_stops_listening_while_the_main_thread_is_in(
    tmp_path: Path, place: str
) -> None:
    with run(tmp_path, ASIDE + PLACES[place]) as script:
        assert float(script.expect("started")) < signals._START_SECONDS
        script.expect("heard")
        assert script.expect("same").startswith("True"), script.lines
        assert script.wait() == 0
        assert script.errors() == ""


@pytest.mark.parametrize("place", ["thread.join()", "time.sleep(1.5)", ""])
def test_the_main_thread_goes_on_as_if_nothing_had_been_and_nothing_is_said(
    tmp_path: Path, place: str
) -> None:
    body = ASIDE.replace("WAIT = False", "WAIT, hook = True, sys.unraisablehook")
    body += f"began = time.perf_counter()\n{place}\nsay('took', time.perf_counter() - began)\n"
    body += "thread.join()\ntime.sleep(0)\nsay('hook', sys.unraisablehook is hook)"
    with run(tmp_path, body) as script:
        if "sleep" in place:
            assert float(script.expect("took")) >= 1.5
        assert script.expect("hook") == "True"
        assert script.wait() == 0
        assert script.errors() == ""


def test_a_c_call_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    body = ASIDE.replace("listener.start()", "threading.Timer(0.3, release).start()\n    listener.start()")
    with run(tmp_path, body + "stuck()\nthread.join()") as script:
        assert float(script.expect("started")) >= 0.3
        script.expect("heard")
        assert script.expect("same").startswith("True"), script.lines


STUCK = """
def aside():
    time.sleep(0.15)
    before = left()
    signals._START_SECONDS = 0.3
    try:
        SignalListener(['SIGTERM'], print).start()
    except RuntimeError as error:
        say('error', error)
    say('same', left() == before, signals._live)
    release()
    back.wait()
    say('same', left() == before)
hook, back = sys.unraisablehook, threading.Event()
thread = threading.Thread(target=aside)
thread.start()
stuck()
back.set()
thread.join()
say('hook', sys.unraisablehook is hook)
"""


def test_a_c_call_that_does_not_end_is_reported_and_nothing_is_installed_later(tmp_path: Path) -> None:
    with run(tmp_path, STUCK) as script:
        said = script.expect("error")
        assert said == "cannot listen to SIGTERM: the main thread is in a call that did not end within 0.3 s"
        assert script.expect("same") == "True None"
        assert script.expect("same") == "True"
        assert script.expect("hook") == "True"
        assert script.wait() == 0
        assert script.errors() == ""


def test_a_notice_reaches_a_listener_of_a_side_thread_while_the_main_thread_is_in_a_c_call(
    tmp_path: Path,
) -> None:
    body = """
def aside():
    SignalListener(['SIGTERM'], lambda signum, count: say('heard', count)).start()
    started.set()
    time.sleep(0.15)
    say('ready')
started = threading.Event()
threading.Thread(target=aside).start()
started.wait()
stuck()
"""
    with run(tmp_path, body) as script:
        script.expect("ready")
        script.send(signal.SIGTERM)
        assert script.expect("heard") == "1"


STOPPED_IN_C = """
listener = SignalListener(['SIGTERM'], print)
listener.start()
def aside():
    time.sleep(0.15)
    signals._STOP_SECONDS = 0.1
    listener.stop(ignore=IGNORE)
    say('stopped', signal.getsignal(signal.SIGTERM) == listener._handler)
    release()
threading.Thread(target=aside).start()
stuck()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.01)
say('alive')
sys.exit(75)
"""


@pytest.mark.parametrize(("ignore", "code"), [(False, -signal.SIGTERM), (True, 75)])
def test_after_a_stop_that_did_not_reach_the_main_thread_the_next_signal_puts_things_back(
    tmp_path: Path, ignore: Any, code: Any
) -> None:
    with run(tmp_path, STOPPED_IN_C.replace("IGNORE", str(ignore))) as script:
        assert script.expect("stopped") == "True"
        assert script.wait() == code


def test_a_main_thread_without_any_python_handler_is_reached_in_its_waiting_for_locks(tmp_path: Path) -> None:
    # as a shell starts a job in the background
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + ASIDE + "never.wait()"
    with run(tmp_path, body) as script:
        script.expect("heard")
        assert script.expect("same").startswith("True"), script.lines


def test_a_signal_that_somebody_uses_is_not_borrowed(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGURG, lambda *_: say('urgent'))\n" + ASIDE + "time.sleep(1000)"
    with run(tmp_path, body) as script:
        script.expect("heard")
        assert script.expect("same").startswith("True"), script.lines
        assert "urgent" not in script.lines


def aside(work: Any) -> list[BaseException]:
    """Do it in a side thread, while this one waits; what it raised."""
    raised: list[BaseException] = []

    def do() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    thread.join()
    return raised


def test_what_the_work_raises_is_raised_where_it_was_asked_for() -> None:
    names: list[str] = []

    def work() -> None:
        names.append(threading.current_thread().name)
        raise ValueError("no")

    (error,) = aside(lambda: mainthread.call(work, 60))
    assert (type(error), str(error), names) == (ValueError, "no", ["MainThread"])


def test_many_side_threads_ask_at_once() -> None:
    done: queue.Queue[int] = queue.Queue()
    hook = sys.unraisablehook
    threads = [
        threading.Thread(target=mainthread.call, args=(lambda n=n: done.put(n), 60)) for n in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done.queue) == list(range(50))
    assert sys.unraisablehook is hook
    assert not mainthread._tasks


def test_what_a_child_inherits_of_its_parents_work_it_does_not_do() -> None:
    task = mainthread._MainThreadTask(lambda: os._exit(9))
    pid = os.fork()
    if pid == 0:
        task.run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_other_unraisable_errors_go_where_they_went_before(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    hook = mainthread._Hook()
    ours, theirs = OSError(f"Signal {int(signal.SIGURG)} ignored due to race condition"), OSError("disk full")
    for error in (ours, theirs):
        sys.unraisablehook(type("Unraisable", (), {"exc_value": error}))
    hook.remove()
    assert [one.exc_value for one in said] == [theirs]
    assert sys.unraisablehook == said.append


def test_two_threads_cannot_both_listen() -> None:
    first = SignalListener(["SIGUSR1"], lambda signum, count: None)
    assert aside(first.start) == []
    (error,) = aside(SignalListener(["SIGUSR2"], lambda signum, count: None).start)
    assert "another SignalListener is live" in str(error)
    assert aside(first.stop) == []
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_signal_that_nobody_can_catch_is_refused_in_a_side_thread_too() -> None:
    before = set(os.listdir("/proc/self/fd"))
    (error,) = aside(SignalListener(["SIGUSR1", "SIGKILL"], lambda signum, count: None).start)
    assert "cannot listen to SIGUSR1, SIGKILL" in str(error)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert set(os.listdir("/proc/self/fd")) == before
    assert signals._live is None
