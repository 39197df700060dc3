"""Events, in one JSONL file per rank, and the progress of the run, in one small JSON file, for external
readers.

Bounded and never blocking: `emit()` and `update()` only put something into memory, and a side thread calls
`flush()`. If the disk is full or gone, lines are dropped and counted, and training continues. Nothing is
fsynced: the log explains a checkpoint, it is no part of one. The file is reopened for each flush, so that no
descriptor outlives a fork, and a directory that is moved away or unmounted under the run costs lines, not the
run.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from lastcall.clock import Clock

LIMIT_BYTES = 4 * 1024 * 1024
# lines that wait for a flush; the oldest are dropped first, since the newest tell why a run ended
_PENDING = 4096
_LONGEST_LINE = 64 * 1024
_DEPTH = 8
_CLOSE_SECONDS = 1.0  # how long close() waits for a flush that hangs on a dead disk
_AVERAGE_SECONDS = 30.0  # the period over which the speed is averaged
_OURS = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
T = TypeVar("T")
Hearer = Callable[[float, str, Mapping[str, object]], None]


class EventLog:
    """One rank's log: at most `limit_bytes` in `path`, and as much again in `<path>.1`, which holds what was
    before."""

    def __init__(self, path: Path, clock: Clock, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self.dropped = 0  # events that never reached the file
        self.error: OSError | None = None  # why, if it was the disk: the last one
        # called with each event at once, on the thread that emits it: it must be quick and never fail
        self.heard: Hearer | None = None
        self._clock = clock
        self._limit = limit_bytes
        self._pending: collections.deque[tuple[float, str, dict[str, object]]] = collections.deque()
        self._lock = threading.RLock()  # reentrant: a finalizer may emit while its thread is inside emit()
        self._writing = threading.Lock()
        self._closed = False
        self._folder = _Folder(path.parent)
        self._told = 0  # how many of the dropped events are recorded in the file

    def emit(self, kind: str, /, **fields: object) -> None:
        """Note an event. Fields are rendered when flushed, so pass values that do not change."""
        with self._lock:
            if self._closed:
                self.dropped += 1
                return
            if len(self._pending) >= _PENDING:
                self._pending.popleft()
                self.dropped += 1
            at = self._clock.wall()
            self._pending.append((at, kind, fields))
        if self.heard is not None:
            self.heard(at, kind, fields)

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
    """The progress of the run: `progress.json`, replaced atomically so that a reader never sees half of it.

    An adapter reports it from the training thread, at the cost of a few stores:

        progress.total = 1000              steps in all, where known; may be set or changed at any time
        progress.total_epochs = 3          the same for epochs; a fraction is fine
        progress.expect = lambda: 1000     called at every flush for the value of `total`; None: not known yet
        progress.where = lambda: step      used when nothing was reported: a run that never reports has a step
                                           and a speed, too
        progress.update(step, epoch, metrics, eval_metrics)

    `update` wants the number of completed steps. Each of the others may be left out, and keeps its last
    value: so a step calls `update(step, epoch)`, a log line adds `metrics` (loss, learning rate), an
    evaluation adds `eval_metrics`. `epoch` may be a fraction. The mappings are kept until the flush: pass
    ones that do not change later. Tensors in them are not waited for.

    The speed is that of the last half minute. The time that is left comes from the steps and the time since
    this incarnation began to make steps, evaluations and saves included; what earlier incarnations did counts
    for nothing but the step. Nothing here marks a run as complete: one that was preempted stays at its last
    step.
    """

    def __init__(self, path: Path, clock: Clock, *, total: int | None = None) -> None:
        self.path = path
        self.total = total
        self.total_epochs: float | None = None
        self.expect: Callable[[], int | None] | None = None
        self.where: Callable[[], int] | None = None
        # what was flushed last, for readers in this process; never changed in place
        self.document: dict[str, object] | None = None
        self.error: OSError | None = None
        self._clock = clock
        # Each holds at most one thing that is new: `append` and `popleft` are atomic, so that no update is
        # lost to a flush.
        self._news: collections.deque[tuple[int, float | None]] = collections.deque(maxlen=1)
        self._metrics: collections.deque[Mapping[str, object]] = collections.deque(maxlen=1)
        self._eval_metrics: collections.deque[Mapping[str, object]] = collections.deque(maxlen=1)
        self._numbers: dict[str, object] = {}
        self._eval_numbers: dict[str, object] = {}
        self._epoch: float | None = None
        self._stood: int | None = None  # the step of the run at the last check
        self._writing = threading.Lock()
        self._folder = _Folder(path.parent)
        self._first: tuple[int, float] | None = None  # step and time of the first flush of this incarnation
        self._seen: tuple[int, float] | None = None  # ... and of the last one
        self._speed: float | None = None

    def update(
        self,
        step: int,
        epoch: float | None = None,
        metrics: Mapping[str, object] | None = None,
        eval_metrics: Mapping[str, object] | None = None,
    ) -> None:
        """Note where the run is; what is None stays as it was."""
        if metrics is not None:
            self._metrics.append(metrics)
        if eval_metrics is not None:
            self._eval_metrics.append(eval_metrics)
        self._news.append((step, epoch))  # last: this is what a flush checks

    def flush(self) -> None:
        """Write the latest update, if there is a new one. Waits for the device where a metric is being
        computed."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            news = _taken(self._news) or self._looked()
            if news is not None:
                self._write(*news)
        except OSError as error:
            self.error = error
        finally:
            self._writing.release()

    def _looked(self) -> tuple[int, None] | None:
        """The run's own step, if it has changed. The first value does not count: it is unknown how long the
        run has been at that step."""
        if self.where is None:
            return None
        step, stood = self.where(), self._stood
        self._stood = step
        return None if stood is None or step == stood else (step, None)

    def _write(self, step: int, epoch: float | None) -> None:
        self._stood = step
        self._epoch = self._epoch if epoch is None else epoch
        metrics, eval_metrics = _taken(self._metrics), _taken(self._eval_metrics)  # drops the tensors, too
        if metrics is not None:
            self._numbers = {str(name): _number(value) for name, value in dict(metrics).items()}
        if eval_metrics is not None:
            self._eval_numbers = {str(name): _number(value) for name, value in dict(eval_metrics).items()}
        if self.expect is not None:
            self.total = self.expect()
        speed, rate = self._measure(step)
        left = None if self.total is None else max(self.total - step, 0)
        self.document = {
            "step": step,
            "epoch": self._epoch,
            "metrics": self._numbers,
            "eval_metrics": self._eval_numbers,
            "steps_per_second": speed,
            "eta_seconds": left / rate if left is not None and rate else None,
            "total": self.total,
            "total_epochs": self.total_epochs,
            "at": self._clock.wall(),
        }
        self._folder.make()
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # left behind by a killed process, or a link to another file
        with open(os.open(temporary, _OURS | os.O_WRONLY | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:
            file.write(json.dumps(_plain(self.document)) + "\n")
        os.replace(temporary, self.path)

    def _measure(self, step: int) -> tuple[float | None, float | None]:
        """Steps a second: lately, an exponential average in which a longer stretch of time weighs more; and
        since the first flush."""
        now = self._clock.now()
        seen, self._seen = self._seen, (step, now)
        # the run went back: the measurements belong to an earlier incarnation
        if seen is None or step < seen[0]:
            self._first, self._speed = (step, now), None
            return None, None
        assert self._first is not None
        if now > seen[1]:
            rate, weight = (step - seen[0]) / (now - seen[1]), -math.expm1((seen[1] - now) / _AVERAGE_SECONDS)
            self._speed = rate if self._speed is None else self._speed + weight * (rate - self._speed)
        lasted = now - self._first[1]
        return self._speed, (step - self._first[0]) / lasted if lasted > 0 else None


def _taken(news: collections.deque[T]) -> T | None:
    try:
        return news.popleft()
    except IndexError:
        return None


class _Folder:
    """Created once: if the user removes the directory, the run must not recreate it with only a log in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made = False

    def make(self) -> None:
        if not self.made:
            self.path.mkdir(parents=True, exist_ok=True)
            self.made = True


def read(path: Path) -> Iterator[dict[str, object]]:
    """The events of a log, oldest first, rotated ones too. Torn lines are skipped; a missing file is an empty
    one."""
    return parsed(itertools.chain(_lines(_rotated(path)), _lines(path)))


def parsed(lines: Iterable[bytes]) -> Iterator[dict[str, object]]:
    """The events in these lines; invalid lines are skipped."""
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def _lines(path: Path) -> Iterator[bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return
        raise
    with open(fd, "rb") as file:
        while stat.S_ISREG(os.fstat(fd).st_mode) and (line := file.readline(2 * _LONGEST_LINE)):
            yield line


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
    fd = _log_file(path)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # the last writer was killed, or out of space, in the middle of a line
        written = os.write(fd, data)
    finally:
        os.close(fd)
    if written < len(data):
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written", str(path))


def _log_file(path: Path) -> int:
    """A plain file of its own. A link in its place would redirect the write, and a pipe would block it."""
    try:
        fd = os.open(path, _OURS | os.O_RDWR | os.O_APPEND, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
    else:
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
            return fd
        os.close(fd)
    os.unlink(path)
    return os.open(path, _OURS | os.O_RDWR | os.O_APPEND | os.O_EXCL, 0o644)


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
    """A value as JSON that every reader accepts, browsers included: no NaN, no huge integers, no cycles."""
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
            value = value.detach()  # torch warns when a tensor that requires grad is converted to a number
        return float(value)
    except Exception:
        return None
