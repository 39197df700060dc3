"""For all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A runner started in the background of a shell has SIGINT ignored, and so would every process that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
