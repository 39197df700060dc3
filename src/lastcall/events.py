"""What happened, as one JSONL file per rank, and how far the run is, as one small JSON file, for readers outside.

Bounded and never blocking: `emit()` and `update()` only put something into memory, and a side thread calls `flush()`.
Where the disk is full or gone, lines are dropped and counted, and training goes on. Nothing is fsynced: the log
explains a checkpoint, it is no part of one. The file is opened anew for each flush, so that no descriptor outlives a
fork, and a directory that is moved away or unmounted under the run costs lines, not the run.
"""

from __future__ import annotations

import collections
import errno
import itertools
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lastcall.clock import Clock

LIMIT_BYTES = 4 * 1024 * 1024
_PENDING = 4096  # lines that wait for a flush; the oldest go first, since the newest say why a run ended
_LONGEST_LINE = 64 * 1024
_DEPTH = 8
_CLOSE_SECONDS = 1.0  # how long close() waits for a flush that hangs on a dead disk
_AVERAGE_SECONDS = 30.0  # what the speed is averaged over


class EventLog:
    """One rank's log: at most `limit_bytes` in `path`, and as much again in `<path>.1`, which holds what was before."""

    def __init__(self, path: Path, clock: Clock, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self.dropped = 0  # events that never reached the file
        self.error: OSError | None = None  # why, if it was the disk: the last one
        self._clock = clock
        self._limit = limit_bytes
        self._pending: collections.deque[tuple[float, str, dict[str, object]]] = collections.deque()
        self._lock = threading.RLock()  # reentrant: a finalizer may emit while its thread is inside emit()
        self._writing = threading.Lock()
        self._closed = False
        self._folder = _Folder(path.parent)
        self._told = 0  # how many of the dropped ones the file knows of

    def emit(self, kind: str, /, **fields: object) -> None:
        """Note an event. Fields are rendered when flushed, so hand over values that do not change."""
        with self._lock:
            if self._closed:
                self.dropped += 1
                return
            if len(self._pending) >= _PENDING:
                self._pending.popleft()
                self.dropped += 1
            self._pending.append((self._clock.wall(), kind, fields))

    def flush(self) -> None:
        """Append what is pending with one write. Returns at once while another thread is at it."""
        if self._writing.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._writing.release()

    def close(self) -> None:
        """Flush for the last time; events that come later are counted as dropped."""
        with self._lock:
            self._closed = True
        if self._writing.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._write()
            finally:
                self._writing.release()

    def _write(self) -> None:
        with self._lock:
            events = list(self._pending)
            self._pending.clear()
            untold = self.dropped - self._told
        notice = _line(self._clock.wall(), "dropped", {"count": untold}) if untold else b""
        lines = _newest([_line(*event) for event in events], self._limit - len(notice))
        try:
            if notice or lines:
                self._folder.make()
                _append(self.path, notice + b"".join(lines), self._limit)
            self._told += untold
        except OSError as error:
            self.error = error
            lines = []
        with self._lock:
            self.dropped += len(events) - len(lines)


class Progress:
    """How far the run is: `progress.json`, replaced as a whole so that a reader never sees half of it."""

    def __init__(self, path: Path, clock: Clock, *, total: int | None = None) -> None:
        self.path = path
        self.total = total  # steps in all, where known; may be set later
        self.error: OSError | None = None
        self._clock = clock
        self._latest: tuple[int, float | None, Mapping[str, object]] | None = None
        self._writing = threading.Lock()
        self._folder = _Folder(path.parent)
        self._seen: tuple[int, float] | None = None  # step and time of the last flush
        self._speed: float | None = None

    def update(self, step: int, epoch: float | None = None, metrics: Mapping[str, object] | None = None) -> None:
        """Note where the run is. `metrics` is kept until the flush: hand over a mapping that nobody changes later."""
        self._latest = (step, epoch, metrics or {})

    def flush(self) -> None:
        """Write the latest update, if there is a new one. Waits for the device where a metric is being computed."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            latest, self._latest = self._latest, None  # drops the tensors, too
            if latest is not None:
                self._write(*latest)
        except OSError as error:
            self.error = error
        finally:
            self._writing.release()

    def _write(self, step: int, epoch: float | None, metrics: Mapping[str, object]) -> None:
        speed = self._measure(step)
        left = None if self.total is None else max(self.total - step, 0)
        document = {
            "step": step,
            "epoch": epoch,
            "metrics": {str(name): _number(value) for name, value in dict(metrics).items()},
            "steps_per_second": speed,
            "eta_seconds": left / speed if left is not None and speed else None,
            "total": self.total,
            "at": self._clock.wall(),
        }
        self._folder.make()
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        temporary.write_text(json.dumps(_plain(document)) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    def _measure(self, step: int) -> float | None:
        """Steps a second: an exponential average in which a longer stretch of time weighs more."""
        now = self._clock.now()
        seen, self._seen = self._seen, (step, now)
        if seen is None or now <= seen[1]:
            return self._speed
        if step < seen[0]:  # the run went back: what was measured belongs to another life of it
            self._speed = None
            return None
        rate, weight = (step - seen[0]) / (now - seen[1]), -math.expm1((seen[1] - now) / _AVERAGE_SECONDS)
        self._speed = rate if self._speed is None else self._speed + weight * (rate - self._speed)
        return self._speed


class _Folder:
    """Made once: a run whose directory was removed by its user must not bring it back with nothing but a log in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made = False

    def make(self) -> None:
        if not self.made:
            self.path.mkdir(parents=True, exist_ok=True)
            self.made = True


def read(path: Path) -> Iterator[dict[str, object]]:
    """The events of a log, oldest first, rotated ones too. Torn lines are skipped; a missing file is an empty one."""
    return parsed(itertools.chain(_lines(_rotated(path)), _lines(path)))


def parsed(lines: Iterable[bytes]) -> Iterator[dict[str, object]]:
    """The events in these lines; what makes no sense is skipped."""
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except FileNotFoundError:
        return


def _rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _newest(lines: list[bytes], limit: int) -> list[bytes]:
    """As many of the last lines as fit the limit."""
    total, count = 0, 0
    for line in reversed(lines):
        total += len(line)
        if total > limit:
            break
        count += 1
    return lines[len(lines) - count :]


def _append(path: Path, data: bytes, limit: int) -> None:
    if path.exists() and path.stat().st_size + len(data) > limit:
        os.replace(path, _rotated(path))
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # the last writer was killed, or out of space, in the middle of a line
        written = os.write(fd, data)
    finally:
        os.close(fd)
    if written < len(data):
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written", str(path))


def _line(at: float, kind: str, fields: Mapping[str, object]) -> bytes:
    event: dict[str, object] = {"at": at, "kind": kind}
    try:
        text = json.dumps({**event, **{name: _plain(fields[name]) for name in fields if name not in event}})
    except Exception as error:
        text = json.dumps({**event, "unprintable": repr(error)})
    if len(text) > _LONGEST_LINE:
        text = json.dumps({**event, "too_long": len(text)})
    return text.encode() + b"\n"


def _plain(value: object, depth: int = 0) -> object:
    """A value as JSON that every reader takes, a browser's included: no NaN, no endless integers, no cycles."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 64 else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if depth < _DEPTH and isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if depth < _DEPTH and isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    return _repr(value)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"


def _number(value: object) -> object:
    """A metric as a number: None where its conversion fails, text where it was never one."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return _plain(value)
    try:
        if hasattr(value, "detach"):
            value = value.detach()  # torch warns when a tensor that wants a gradient is turned into a number
        return _plain(float(value))
    except Exception:
        return None
