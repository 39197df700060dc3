"""What a piece of work costs besides time: CPU seconds of all threads, and memory at its highest.

Memory is the kernel's own high-water mark (VmHWM, set back through /proc/self/clear_refs), which no short
peak escapes and which needs no sampling thread that would fight the measured code for the interpreter lock.
Where the kernel refuses to set it back, a thread samples. CPU seconds are this process's: the kernel's
writeback threads are not in it, which flatters buffered writers.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from pathlib import Path

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_CLEAR = Path("/proc/self/clear_refs")
_SAMPLE_S = 0.005
_PAGE = os.sysconf("SC_PAGE_SIZE")


def trim() -> None:
    """Give freed memory back, so that one method's leftovers are not the next one's warm pages."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc only
        libc.malloc_trim(0)


def resident() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE


def _high_water() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _reset_high_water() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return "VmHWM" in _STATUS.read_text()  # gVisor's has none


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = resident()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self.peak = max(self.peak, resident())

    def finish(self) -> int:
        self.peak = max(self.peak, resident())
        self._done.set()
        self.join()
        return self.peak


class Meter:
    """Around the measured code: `with Meter() as meter: ...`, then seconds, cpu, peak (bytes above what was
    resident before)."""

    seconds: float
    cpu: float
    peak: int

    def __enter__(self) -> Meter:
        self._sampler = None if _reset_high_water() else _Sampler()
        if self._sampler:
            self._sampler.start()
        self._resident = resident()
        self._cpu = _cpu_seconds()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.cpu = _cpu_seconds() - self._cpu
        highest = self._sampler.finish() if self._sampler else _high_water()
        self.peak = max(0, highest - self._resident)


def _cpu_seconds() -> float:
    return sum(os.times()[:4])
