from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.scripts import Script, eventually, gone
from lastcall.notices import signals
from lastcall.notices.signals import SignalListener
from lastcall.types import Notice

PRELUDE = """
import asyncio, ctypes, logging, os, signal, sys, threading, time
from lastcall.notices.signals import SignalListener
logging.basicConfig(stream=sys.stdout, format="log %(message)s")
def hear(signum, count):
    print("heard", signal.Signals(signum).name, count, flush=True)
def stuck():
    "Lock a mutex twice: a C call that no signal interrupts and that never ends."
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
def idle():
    while True:
        time.sleep(0.01)
"""


@pytest.fixture
def put_back() -> Iterator[Any]:
    """Whatever a test leaves behind in this process is put back, so that one failure does not become many."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    if signals._live is not None:
        signals._live.stop()
    for signum, handler in before.items():
        signal.signal(signum, handler)
    signal.set_wakeup_fd(-1)


@pytest.fixture
def heard() -> Any:
    return queue.Queue()


def listen(heard: queue.Queue[Notice], *names: str) -> SignalListener:
    listener = SignalListener(names, lambda signum, count: heard.put((signum, count)))
    listener.start()
    return listener


def run(tmp_path: Path, body: str, **options: Any) -> Script:
    return Script(tmp_path, PRELUDE + body, **options)


def test_a_signal_is_heard_while_the_main_thread_is_stuck_in_a_c_call(tmp_path: Path) -> None:
    with run(tmp_path, "SignalListener(['SIGTERM'], hear).start()\nprint('ready')\nstuck()") as script:
        script.expect("ready")
        script.send(signal.SIGTERM)
        assert script.expect("heard") == "SIGTERM 1"


def test_a_second_ctrl_c_is_counted_while_the_main_thread_is_stuck_in_a_c_call(tmp_path: Path) -> None:
    with run(tmp_path, "SignalListener(['SIGINT'], hear).start()\nprint('ready')\nstuck()") as script:
        script.expect("ready")
        script.send(signal.SIGINT)
        assert script.expect("heard") == "SIGINT 1"
        script.send(signal.SIGINT)
        assert script.expect("heard") == "SIGINT 2"


@pytest.mark.usefixtures("put_back")
def test_a_signal_that_both_handlers_report_counts_once(heard: Any) -> None:
    listener = listen(heard, "SIGUSR1", "SIGUSR2")
    for count in range(1, 6):
        signal.raise_signal(signal.SIGUSR1)
        assert heard.get(timeout=60) == (signal.SIGUSR1, count)
    signal.raise_signal(signal.SIGUSR2)
    listener.stop()
    assert heard.get_nowait() == (signal.SIGUSR2, 1)
    assert heard.empty()


@pytest.mark.usefixtures("put_back")
def test_a_signal_of_somebody_else_is_not_ours(heard: Any) -> None:
    theirs = []
    signal.signal(signal.SIGUSR2, lambda *_: theirs.append("theirs"))
    listener = listen(heard, "SIGUSR1")
    signal.raise_signal(signal.SIGUSR2)
    listener.stop()
    assert theirs == ["theirs"]
    assert heard.empty()


@pytest.mark.usefixtures("put_back")
def test_stopping_puts_handlers_wakeup_fd_thread_and_descriptors_back(heard: Any) -> None:
    def theirs(signum: int, frame: Any) -> None:
        raise AssertionError("never sent")

    signal.signal(signal.SIGUSR1, theirs)
    before = set(os.listdir("/proc/self/fd"))
    listener = listen(heard, "SIGUSR1", "SIGUSR2")
    assert "lastcall-signals" in {thread.name for thread in threading.enumerate()}
    listener.stop()
    listener.stop()
    assert signal.getsignal(signal.SIGUSR1) is theirs
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    assert "lastcall-signals" not in {thread.name for thread in threading.enumerate()}
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("put_back")
def test_a_handler_and_a_wakeup_fd_that_came_after_ours_stay(heard: Any) -> None:
    listener = listen(heard, "SIGUSR1")

    def later(signum: int, frame: Any) -> None:
        raise AssertionError("never sent")

    signal.signal(signal.SIGUSR1, later)
    one, other = socket.socketpair()
    with one, other:
        other.setblocking(False)
        signal.set_wakeup_fd(other.fileno())
        listener.stop()
        assert signal.getsignal(signal.SIGUSR1) is later
        assert signal.set_wakeup_fd(-1) == other.fileno()


@pytest.mark.usefixtures("put_back")
def test_a_wakeup_fd_that_was_there_before_gets_every_byte_and_comes_back(heard: Any) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(60)
        other.setblocking(False)
        signal.set_wakeup_fd(other.fileno())
        signal.signal(signal.SIGUSR2, lambda *_: None)
        listener = listen(heard, "SIGUSR1")
        signal.raise_signal(signal.SIGUSR1)
        assert one.recv(10) == bytes([signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR2)
        assert one.recv(10) == bytes([signal.SIGUSR2])
        listener.stop()
        assert signal.set_wakeup_fd(-1) == other.fileno()
    assert heard.get_nowait() == (signal.SIGUSR1, 1)


@pytest.mark.usefixtures("put_back")
def test_a_file_that_got_the_number_of_a_closed_wakeup_fd_is_never_written_to(
    heard: Any, tmp_path: Path
) -> None:
    one, other = socket.socketpair()
    other.setblocking(False)
    number = other.fileno()
    signal.set_wakeup_fd(number)
    listener = listen(heard, "SIGUSR1")
    one.close()
    other.close()
    path = tmp_path / "checkpoint"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.dup2(fd, number)
        signal.raise_signal(signal.SIGUSR1)
        assert heard.get(timeout=60) == (signal.SIGUSR1, 1)
        listener.stop()
        assert path.read_bytes() == b""
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        os.close(fd)
        if fd != number:
            os.close(number)


@pytest.mark.usefixtures("put_back")
def test_signals_that_are_pending_when_it_stops_are_handed_on() -> None:
    heard: list[int] = []
    release = threading.Event()

    def slow(signum: int, count: int) -> None:
        release.wait(60)
        heard.append(count)

    listener = SignalListener(["SIGUSR1"], slow)
    listener.start()
    wake = listener._wake

    def release_when_stopping(byte: int) -> None:
        wake(byte)
        if byte == signals._STOP:
            release.set()

    listener._wake = release_when_stopping
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    listener.stop()
    assert heard == [1, 2]


@pytest.mark.usefixtures("put_back")
def test_it_can_be_stopped_from_its_own_callback(heard: Any) -> None:
    def stop(signum: int, count: int) -> None:
        listener.stop(ignore=True)
        heard.put("stopped")

    listener = SignalListener(["SIGUSR1"], stop)
    listener.start()
    signal.raise_signal(signal.SIGUSR1)
    assert heard.get(timeout=60) == "stopped"
    listener._thread.join(60)
    signal.raise_signal(signal.SIGUSR1)
    assert heard.empty()


@pytest.mark.usefixtures("put_back")
def test_the_handler_that_was_there_before_is_called_in_the_main_thread(heard: Any) -> None:
    called = []
    signal.signal(
        signal.SIGUSR1, lambda signum, frame: called.append((signum, threading.current_thread().name))
    )
    listener = listen(heard, "SIGUSR1")
    signal.raise_signal(signal.SIGUSR1)
    listener.stop()
    assert called == [(signal.SIGUSR1, "MainThread")]
    assert heard.get_nowait() == (signal.SIGUSR1, 1)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("theirs")])
@pytest.mark.usefixtures("put_back")
def test_what_a_chained_handler_raises_is_deferred_and_logged(
    heard: Any, caplog: pytest.LogCaptureFixture, error: Any
) -> None:
    def theirs(signum: int, frame: Any) -> None:
        raise error

    signal.signal(signal.SIGUSR1, theirs)
    listener = listen(heard, "SIGUSR1")
    signal.raise_signal(signal.SIGUSR1)
    listener.stop()
    assert listener.deferred is error
    assert f"previous SIGUSR1 handler raised {error!r}; deferred" in caplog.text
    assert heard.get_nowait() == (signal.SIGUSR1, 1)


def test_ctrl_c_raises_no_keyboard_interrupt_when_it_is_ours(tmp_path: Path) -> None:
    body = """
print('ready' if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 'wrong')
listener = SignalListener(['SIGINT'], hear)
listener.start()
signal.raise_signal(signal.SIGINT)
listener.stop()
print('deferred', listener.deferred)
"""
    with run(tmp_path, body) as script:
        script.expect("ready")
        assert script.expect("heard") == "SIGINT 1"
        assert script.expect("deferred") == "None"
        assert script.wait() == 0


@pytest.mark.usefixtures("put_back")
def test_a_failing_callback_is_logged_and_the_next_signal_is_heard(
    heard: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(signum: int, count: int) -> None:
        heard.put(count)
        raise OSError("no such luck")

    listener = SignalListener(["SIGUSR1"], fail)
    listener.start()
    signal.raise_signal(signal.SIGUSR1)
    assert heard.get(timeout=60) == 1
    signal.raise_signal(signal.SIGUSR1)
    assert heard.get(timeout=60) == 2
    listener.stop()
    assert "handling SIGUSR1 failed" in caplog.text
    assert "no such luck" in caplog.text


def test_an_asyncio_loop_that_came_before_keeps_its_signals(tmp_path: Path) -> None:
    body = """
async def main():
    loop, got = asyncio.get_running_loop(), asyncio.Queue()
    loop.add_signal_handler(signal.SIGUSR1, got.put_nowait, 'theirs')
    listener = SignalListener(['SIGTERM'], hear)
    listener.start()
    print('ready', flush=True)
    print('asyncio', await got.get(), flush=True)
    while not done.is_set():
        await asyncio.sleep(0.01)
    listener.stop()
    print('stopped', flush=True)
    print('asyncio', await got.get(), flush=True)
done = threading.Event()
def hear(signum, count):
    print('heard', count, flush=True)
    done.set()
asyncio.run(main())
"""
    with run(tmp_path, body) as script:
        script.expect("ready")
        script.send(signal.SIGUSR1)
        script.expect("asyncio theirs")
        script.send(signal.SIGTERM)
        script.expect("heard 1")
        script.expect("stopped")
        script.send(signal.SIGUSR1)
        script.expect("asyncio theirs")
        assert script.wait() == 0


def test_an_asyncio_loop_that_takes_the_wakeup_fd_later_keeps_it_and_we_still_hear(tmp_path: Path) -> None:
    body = """
done = threading.Event()
def once(signum, count):
    hear(signum, count)
    done.set()
listener = SignalListener(['SIGTERM'], once)
listener.start()
async def main():
    loop, got = asyncio.get_running_loop(), asyncio.Queue()
    loop.add_signal_handler(signal.SIGUSR1, got.put_nowait, 'theirs')
    print('ours while it runs', listener.rearm(), flush=True)
    print('asyncio', await got.get(), flush=True)
    while not done.is_set():
        await asyncio.sleep(0.01)
asyncio.run(main())
print('ours again', listener.rearm(), flush=True)
stuck()
"""
    with run(tmp_path, body) as script:
        assert script.expect("ours while it runs") == "False"
        script.send(signal.SIGUSR1)
        script.expect("asyncio theirs")
        script.send(signal.SIGTERM)
        assert script.expect("heard") == "SIGTERM 1"
        assert script.expect("ours again") == "True"
        script.send(signal.SIGTERM)
        # the first came by the handler, this one by the wakeup fd
        assert script.expect("heard") == "SIGTERM 2"


def test_a_process_that_inherited_a_blocked_signal_hears_it(tmp_path: Path) -> None:
    body = "SignalListener(['SIGTERM'], hear).start()\nprint('ready')\nstuck()"
    with run(tmp_path, body, blocked=(signal.SIGTERM,)) as script:
        script.expect("ready")
        script.send(signal.SIGTERM)
        assert script.expect("heard") == "SIGTERM 1"


def test_a_process_on_its_way_out_ignores_a_second_sigterm_to_the_very_end(tmp_path: Path) -> None:
    body = """
class Late:
    def __del__(self):  # at the end of interpreter shutdown, when Python has put default handlers back
        os.kill(os.getpid(), signal.SIGTERM)
sys.late = Late()
listener = SignalListener(['SIGTERM'], hear)
listener.start()
listener.stop(ignore=True)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(75)
"""
    with run(tmp_path, body) as script:
        assert script.wait() == 75


STOP_ASIDE = """
listener = SignalListener(['SIGTERM'], hear)
listener.start()
thread = threading.Thread(target=listener.stop, kwargs={'ignore': %s})
thread.start()
thread.join()
print('stopped', flush=True)
time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.01)
print('alive', flush=True)
sys.exit(75)
"""


def test_after_a_stop_in_a_side_thread_a_signal_has_its_former_effect(tmp_path: Path) -> None:
    with run(tmp_path, STOP_ASIDE % False) as script:
        assert script.wait() == -signal.SIGTERM
        script.expect("stopped")
        assert script.lines == ["stopped"]


def test_after_an_ignoring_stop_in_a_side_thread_a_signal_has_none(tmp_path: Path) -> None:
    with run(tmp_path, STOP_ASIDE % True) as script:
        script.expect("stopped")
        script.expect("alive")
        assert script.wait() == 75


@pytest.mark.usefixtures("put_back")
def test_two_cannot_be_live_and_one_cannot_live_twice(heard: Any) -> None:
    listener = listen(heard, "SIGUSR1")
    with pytest.raises(RuntimeError, match="another SignalListener is live"):
        listen(heard, "SIGUSR2")
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    listener.stop()
    with pytest.raises(RuntimeError, match="already used"):
        listener.start()


@pytest.mark.usefixtures("put_back")
def test_a_signal_that_nobody_can_catch_is_refused_and_leaves_nothing_behind(heard: Any) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="cannot listen to SIGUSR1, SIGKILL"):
        listen(heard, "SIGUSR1", "SIGKILL")
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    assert set(os.listdir("/proc/self/fd")) == before
    listen(heard, "SIGUSR1").stop()


def test_an_unknown_signal_is_named_in_the_error(heard: Any) -> None:
    with pytest.raises(ValueError, match="no such signals: SIGFOO"):
        SignalListener(["SIGTERM", "SIGFOO"], lambda signum, count: None)


FORK = """
listener = SignalListener(['SIGTERM'], hear)
listener.start()
before = len(os.listdir('/proc/self/fd'))
def fork():
    if os.fork():
        return
    try:
        closed = before - len(os.listdir('/proc/self/fd'))
        os.write(1, f'child {os.getpid()} {closed} {signal.set_wakeup_fd(-1)}\\n'.encode())
        while True:
            time.sleep(60)
    finally:
        os._exit(9)
%s
print('status', os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
listener.stop()
"""
ASIDE = "thread = threading.Thread(target=fork)\nthread.start()\nthread.join()"


@pytest.mark.parametrize("how", ["fork()", ASIDE], ids=["main thread", "side thread"])
def test_a_forked_child_dies_of_its_own_signal_and_its_parent_hears_nothing(tmp_path: Path, how: Any) -> None:
    with run(tmp_path, FORK % how) as script:
        child, closed, wakeup_fd = map(int, script.expect("child").split())
        assert (closed, wakeup_fd) == (2, -1)
        os.kill(child, signal.SIGTERM)
        assert script.expect("status") == str(-signal.SIGTERM)
        assert script.wait() == 0
        assert not [line for line in script.lines if line.startswith("heard")]


def test_a_forked_child_has_the_handler_that_was_there_before(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: os._exit(17))" + FORK % "fork()"
    with run(tmp_path, body) as script:
        child = int(script.expect("child").split()[0])
        os.kill(child, signal.SIGTERM)
        assert script.expect("status") == "17"
        assert script.wait() == 0


def test_a_forked_child_can_listen_for_itself(tmp_path: Path) -> None:
    body = """
SignalListener(['SIGTERM'], hear).start()
if os.fork() == 0:
    SignalListener(['SIGTERM'], lambda signum, count: (print('child heard', flush=True), os._exit(0))).start()
    print('child', os.getpid(), flush=True)
idle()
"""
    with run(tmp_path, body) as script:
        child = int(script.expect("child"))
        os.kill(child, signal.SIGTERM)
        script.expect("child heard")
        assert eventually(lambda: gone(child))
        script.send(signal.SIGTERM)
        assert script.expect("heard") == "SIGTERM 1"


def test_a_child_forked_after_a_stop_in_a_side_thread_dies_of_its_signal_too(tmp_path: Path) -> None:
    body = FORK % (ASIDE.replace("target=fork", "target=listener.stop") + "\nfork()")
    with run(tmp_path, body) as script:
        child = int(script.expect("child").split()[0])
        os.kill(child, signal.SIGTERM)
        assert script.expect("status") == str(-signal.SIGTERM)
