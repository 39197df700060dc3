from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.processes.scripts import Script
from lastcall.core.process import exits
from lastcall.types import Notice

STUCK = """
    import ctypes, threading
    def stuck():
        "Lock a mutex twice: an uninterruptible C call without the interpreter lock."
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
"""


def notice(signum: int | None) -> Notice:
    return Notice("test", "test", at=0.0, signum=signum)


@pytest.mark.parametrize(
    ("signum", "saved", "code"),
    [
        (signal.SIGTERM, True, 75),
        (signal.SIGTERM, False, 143),
        (signal.SIGUSR1, False, 128 + signal.SIGUSR1),
        (None, True, 75),
        (None, False, 1),
        (signal.SIGINT, True, 130),
        (signal.SIGINT, False, 130),
    ],
)
def test_the_exit_code_says_what_happened(signum: int, saved: Any, code: Any) -> None:
    assert exits.code(notice(signum), saved, 75) == code


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_who_dies_of_a_signal_has_its_status_even_if_it_was_handled_and_blocked(
    tmp_path: Path, signum: int
) -> None:
    source = f"""
        import signal
        from lastcall.core.process import exits
        signal.signal({int(signum)}, lambda *_: print("handled"))
        signal.pthread_sigmask(signal.SIG_BLOCK, [{int(signum)}])
        print("last words", end="")
        exits.die_of({int(signum)})
    """
    with Script(tmp_path, source) as script:
        assert script.wait() == -signum
        script.expect("last words")
        assert script.lines == ["last words"]


def test_a_side_thread_can_die_of_a_signal_while_the_main_thread_is_stuck(tmp_path: Path) -> None:
    source = (
        STUCK
        + """
    from lastcall.core.process import exits
    threading.Timer(0.05, exits.die_of, [15]).start()
    stuck()
    """
    )
    with Script(tmp_path, source) as script:
        assert script.wait() == -signal.SIGTERM


def test_a_signal_that_kills_nobody_still_ends_the_process(tmp_path: Path) -> None:
    source = "from lastcall.core.process import exits; exits.die_of(23)"
    assert signal.SIGURG == 23
    with Script(tmp_path, source) as script:
        assert script.wait() == 128 + signal.SIGURG


def test_leaving_from_a_side_thread_flushes_stdio_and_logging(tmp_path: Path) -> None:
    source = (
        STUCK
        + """
    import logging, logging.handlers, sys
    from lastcall.core.process import exits
    sys.stdout = open(1, "w", buffering=65536, closefd=False)
    target = logging.StreamHandler(sys.stdout)
    logging.getLogger("lastcall").addHandler(logging.handlers.MemoryHandler(1000, target=target))
    logging.getLogger("lastcall").warning("logged")
    sys.stdout.write("printed\\n")
    threading.Timer(0.05, exits.leave, [75]).start()
    stuck()
    """
    )
    with Script(tmp_path, source) as script:
        assert script.wait() == 75
        script.expect("logged")
        assert script.lines == ["printed", "logged"]


def test_leaving_does_not_wait_for_a_lock_that_the_main_thread_holds(tmp_path: Path) -> None:
    source = (
        STUCK
        + """
    import logging, sys
    from lastcall.core.process import exits
    handler = logging.StreamHandler()
    handler.acquire()
    threading.Timer(0.05, exits.leave, [75]).start()
    stuck()
    """
    )
    with Script(tmp_path, source) as script:
        assert script.wait() == 75


def test_a_closed_stdout_does_not_keep_a_process_from_leaving(tmp_path: Path) -> None:
    source = """
        import sys
        from lastcall.core.process import exits
        sys.stdout.close()
        sys.stderr = None
        exits.leave(75)
    """
    with Script(tmp_path, source) as script:
        assert script.wait() == 75
