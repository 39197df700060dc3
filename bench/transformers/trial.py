"""One training in a process of its own: started, told to stop, and watched until its checkpoint is on the
disk."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from bench import disk
from bench.measure import Kind
from bench.transformers.job import Spec, Training

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 300.0  # seconds for one line; whoever takes longer hangs
_LEAVING = 120.0
_LIMIT = 240.0  # from SIGTERM to a checkpoint
_LOOK_S = 0.002  # between two looks at the folder
_VITALS_S = 0.01
_TICK = os.sysconf("SC_CLK_TCK")
_SENTINEL = "checkpoint-is-incomplete.txt"


@dataclass(frozen=True)
class Way:
    """Who protects the training, and how one sees that its checkpoint is complete."""

    name: str
    kind: Kind
    record: str  # the file that is there last
    code: int  # that a saved and stopped run ends with
    jit: bool = False
    kill_wait: float | None = None
    environ: dict[str, str] = field(default_factory=dict)

    def complete(self, folder: Path) -> Path | None:
        for path in folder.glob("checkpoint-*"):
            if (path / self.record).exists() and not (path / _SENTINEL).exists():
                return path
        return None


_ENABLED = {"LASTCALL_ENABLED": "1"}
BARE = Way("nothing", Kind.ASIDE, "trainer_state.json", 0)
THEIRS = Way(
    "Transformers enable_jit_checkpoint, kill wait 3 s", Kind.PEER, "trainer_state.json", 0, jit=True
)
THEIRS_AT_ONCE = replace(
    THEIRS, name="Transformers enable_jit_checkpoint, kill wait patched to 0 s", kill_wait=0.0
)
OURS = Way(
    "lastcall, kill wait 3 s",
    Kind.OURS,
    "lastcall.json",
    75,
    environ={**_ENABLED, "LASTCALL_KILL_WAIT_SECONDS": "3"},
)
OURS_AT_ONCE = Way(
    "lastcall, kill wait 0 s",
    Kind.OURS,
    "lastcall.json",
    75,
    environ={**_ENABLED, "LASTCALL_KILL_WAIT_SECONDS": "0"},
)
QUIET = Way("lastcall", Kind.OURS, "lastcall.json", 75, environ=_ENABLED)


def _environment(way: Way) -> dict[str, str]:
    """As `lastcall run` makes it for the processes below it, or without any trace of lastcall."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("LASTCALL_")}
    bare |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if not way.environ:
        return bare
    from lastcall.auto import environment

    on = {**bare, **way.environ}
    return {**on, **environment.additions(on)}


class Job:
    """The process. It is gone when the block ends, whatever happened in it."""

    def __init__(self, way: Way, spec: Spec, log: Path) -> None:
        self._way = way
        self._log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said: list[dict[str, Any]] = []
        command = [
            sys.executable,
            "-m",
            "bench.transformers.job",
            replace(spec, jit=way.jit, kill_wait=way.kill_wait).line(),
        ]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=_environment(way),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, training: Training) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(training)) + "\n")
        self.process.stdin.flush()

    def until(self, key: str, enough: Callable[[Any], bool] = lambda _: True) -> Any:
        """The value of the first line from now on that has this key and is enough."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no {key} in {_PATIENCE:.0f} s. {self.last_words()}") from None
            if not line:
                raise RuntimeError(
                    f"the training ended with {self.process.wait()} before it said {key}. {self.last_words()}"
                )
            self.said.append(json.loads(line))
            if key in self.said[-1] and enough(self.said[-1][key]):
                return self.said[-1][key]

    def leave(self) -> int:
        """Nothing more to do: its exit code, and what it said last in `said`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait(_LEAVING)
        self._reader.join()
        while line := self._lines.get():
            self.said.append(json.loads(line))
        return code

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "It said last: " + " / ".join(lines[-3:]) if lines else "It said nothing."

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe:
                    pipe.close()


class Vitals:
    """CPU seconds and memory of another process. Memory is the kernel's high-water mark where there is one
    (gVisor has none)."""

    def __init__(self, pid: int, device: Callable[[], int] | None) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._device = device
        with contextlib.suppress(OSError):
            (self._folder / "clear_refs").write_text("5")
        self.resident = self.peak = self._memory("VmRSS")
        self._cpu = self.cpu_now = self._seconds()
        self.device = self.device_peak = device() if device else 0
        self._next = 0.0

    @property
    def cpu(self) -> float:
        return self.cpu_now - self._cpu

    def look(self, at: float | None = None) -> None:
        if at is not None and at < self._next:
            return
        self._next = time.monotonic() + _VITALS_S
        with contextlib.suppress(OSError, StopIteration, IndexError):  # it has gone
            self.peak = max(self.peak, self._memory("VmHWM"), self._memory("VmRSS"))
            self.cpu_now = self._seconds()
        if self._device:
            self.device_peak = max(self.device_peak, self._device())

    def _memory(self, name: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)

    def _seconds(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK


@dataclass(frozen=True)
class Preemption:
    """What came of one SIGTERM. Seconds count from it, bytes are bytes."""

    complete: float  # the checkpoint is there, as far as its maker cares
    durable: float  # ... and its files and names are fsynced
    ended: float  # the process is gone
    step: int
    nbytes: int  # of the files
    cpu: float
    resident: int  # before
    peak: int  # at its highest
    device: int
    device_peak: int
    step_seconds: float  # of the steps before
    checkpoint: Path


def _synced(checkpoint: Path) -> None:
    """For what is fsynced already this takes microseconds a file."""
    for path in disk.files(checkpoint):
        disk.fsync(path)
    disk.fsync(checkpoint)
    disk.fsync(checkpoint.parent)


def preempt(
    job: Job,
    way: Way,
    folder: Path,
    delay: float,
    device: Callable[[], int] | None = None,
    limit: float = 240.0,
) -> Preemption:
    """SIGTERM after `delay` seconds from now."""
    waited = time.monotonic() + delay
    time.sleep(delay)
    vitals = Vitals(job.process.pid, device)
    start = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    while (found := way.complete(folder)) is None:
        now = time.monotonic()
        if job.process.poll() is not None and way.complete(folder) is None:
            raise RuntimeError(
                f"the training ended with {job.process.returncode} and left no checkpoint. {job.last_words()}"
            )
        if now - start > _LIMIT:
            raise TimeoutError(f"no checkpoint {_LIMIT:.0f} s after SIGTERM. {job.last_words()}")
        vitals.look(now)
        time.sleep(_LOOK_S)
    complete = time.monotonic() - start
    vitals.look()
    _synced(found)
    durable = time.monotonic() - start
    code = job.leave()
    ended = time.monotonic() - start
    if code != way.code:
        raise RuntimeError(f"the training ended with {code}, not with {way.code}. {job.last_words()}")
    nbytes = sum(path.stat().st_size for path in disk.files(found))
    ends = [line["at"] for line in job.said if "at" in line and line["at"] < waited]
    step_seconds = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 0.0
    step = int(found.name.rpartition("-")[2])
    return Preemption(
        complete,
        durable,
        ended,
        step,
        nbytes,
        vitals.cpu,
        vitals.resident,
        vitals.peak,
        vitals.device,
        vitals.device_peak,
        step_seconds,
        found,
    )


@contextlib.contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """A folder for one training, removed afterwards."""
    disk.clear(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        disk.clear(folder)
