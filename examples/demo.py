"""Trains examples/train.py twice: once in peace, once taken away again and again, and compares the two bit
for bit.

    python examples/demo.py [--seed N] [--keep FOLDER]

The second run is hit by a SIGTERM to its process, one during a periodic save, one inside a long evaluation,
one to its whole process group, and by a SIGKILL, each at a random moment, and is started again after each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().with_name("train.py")
SOURCES = TRAIN.parent.parent / "src"
STEPS, SAVE_STEPS, EPOCHS = 60, 12, 2
EVALUATION, KILL_WAIT = 3.0, 0.5
ARGUMENTS = [
    "--epochs",
    str(EPOCHS),
    "--samples",
    str(STEPS // EPOCHS * 32),
    "--eval-seconds",
    str(EVALUATION),
]
PATIENCE = 180.0


class Life:
    """One incarnation of the training script, and what it has said so far."""

    def __init__(self, folder: Path, name: str, **env: str) -> None:
        self.directory = folder / name
        self.lines: list[str] = []
        self.log = (folder / f"{name}.log").open("a")
        command = [sys.executable, str(TRAIN), str(self.directory), "--print-steps", "1", *ARGUMENTS]
        path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [*command, "--result", str(folder / f"{name}.result")],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def step(self) -> int:
        """The last completed step, or 0 while it has not said."""
        steps = [match.group(1) for line in list(self.lines) if (match := re.search(r"step (\d+)/", line))]
        return int(steps[-1]) if steps else 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(
                    f"The demo could not go on: training ended with {self.process.poll()}.\n{self.tail()}"
                )
            time.sleep(0.001)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(5.0)
        self.log.close()
        return code

    def tail(self) -> str:
        return "\n".join(Path(self.log.name).read_text().splitlines()[-15:])

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@dataclass
class Blow:
    """One preemption: what to wait for, what to send, and what came of it."""

    what: str
    moment: Callable[[Life], bool]
    delay: float = 0.0
    signum: int = signal.SIGTERM
    group: bool = False
    step: int = 0
    code: int = 0
    seconds: float = 0.0
    saved: dict[str, Any] = field(default_factory=dict)
    sent: float = 0.0

    def strike(self, life: Life) -> None:
        resumed = newest(life.directory).get("step", 0)
        life.wait_until(lambda: self.moment(life))
        life.wait_until(after(self.delay))
        self.sent = time.time()
        began = time.monotonic()
        (os.killpg if self.group else os.kill)(life.process.pid, self.signum)
        self.code = life.wait()
        self.seconds = time.monotonic() - began
        self.saved = newest(life.directory)
        self.step = max(resumed, life.step)


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def newest(directory: Path) -> dict[str, Any]:
    """The commit record of the newest checkpoint."""
    records = [json.loads(path.read_text()) for path in directory.glob("checkpoint-*/lastcall.json")]
    return max(records, key=lambda record: record["sequence"], default={})


def blows(dice: random.Random) -> list[Blow]:
    def at(step: int, how: str = "SIGTERM to the process", **more: Any) -> Blow:
        return Blow(f"{how} at step {step}", lambda life: life.step >= step, dice.uniform(0, 0.1), **more)

    return [
        at(dice.randint(2, 6)),
        Blow("SIGTERM during a periodic save", saving),
        Blow("SIGTERM inside a long evaluation", evaluating, dice.uniform(0, 0.8)),
        at(dice.randint(33, 42), "SIGTERM to the group", group=True),
        at(dice.randint(49, 57), "SIGKILL", group=True, signum=signal.SIGKILL),
    ]


def saving(life: Life) -> bool:
    return any((life.directory / ".lastcall" / "staging").glob("checkpoint-*/*"))


def evaluating(life: Life) -> bool:
    return any(line.startswith("evaluating") for line in list(life.lines))


def row(*cells: str) -> None:
    widths = (36, 32, 7, 7, 7, 4, 11, 22)
    print(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True
    )


def report(blow: Blow, pace: float) -> None:
    saved = blow.saved
    name = f"checkpoint-{saved['step']} ({saved['kind']}, {'exact' if saved['exact'] else 'not exact'})"
    megabytes = sum(file["size"] for file in saved["files"]) / 1e6
    killed = blow.signum == signal.SIGKILL
    since = blow.step - blow.step // SAVE_STEPS * SAVE_STEPS
    row(
        blow.what,
        name,
        f"{megabytes:.1f} MB",
        "before" if saved["created"] < blow.sent else f"{saved['created'] - blow.sent:.2f} s",
        f"{blow.seconds:.2f} s",
        str(blow.code),
        steps(max(0, blow.step - saved["step"]), pace),
        f"{steps(since, pace)} / {steps(blow.step, pace)}",
    )
    if not killed and (blow.code != 75 or not saved["exact"] or saved["step"] < blow.step):
        raise SystemExit(
            f"This preemption lost something: exit code {blow.code}, {name}, at step {blow.step}"
        )


def steps(count: int, pace: float) -> str:
    return f"{count} ({count * pace:.1f} s)"


def reference(folder: Path) -> float:
    """Train in peace. Returns the seconds of a step."""
    life = Life(folder, "reference", LASTCALL_ENABLED="0")
    try:
        life.wait_until(lambda: life.step >= 1)
        began = time.monotonic()
        life.wait_until(lambda: evaluating(life))
        pace = (time.monotonic() - began) / max(1, life.step - 1)
        if life.wait() != 0:
            raise SystemExit(f"The reference run failed:\n{life.tail()}")
    finally:
        life.kill()
    return pace


def preempted(folder: Path, plan: list[Blow], pace: float) -> int:
    """Train under blows, start again after each, and return how many times it was started."""
    env = {
        "LASTCALL_KILL_WAIT_SECONDS": str(KILL_WAIT),
        "LASTCALL_SAVE_STEPS": str(SAVE_STEPS),
        "LASTCALL_SAVE_TOTAL_LIMIT": "2",
    }
    for blow in plan:
        life = Life(folder, "preempted", **env)
        try:
            blow.strike(life)
        finally:
            life.kill()
        report(blow, pace)
    life = Life(folder, "preempted", **env)
    try:
        code = life.wait()
    finally:
        life.kill()
    if code != 0:
        raise SystemExit(f"The last incarnation ended with {code}:\n{life.tail()}")
    return len(plan) + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(2), "big"), help="of the random moments"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="leave the checkpoints, events and logs there")
    args = parser.parse_args()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        name = args.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="lastcall-demo-"))
        folder = Path(name)
        print(f"1. Training {STEPS} steps in peace, without lastcall ...", flush=True)
        pace = reference(folder)
        print(f"   done in {time.monotonic() - began:.0f} s, {pace:.2f} s a step\n")
        print(
            f"2. The same script with lastcall, taken away five times at random moments (seed {args.seed}).\n"
            f"   Kill wait {KILL_WAIT} s, a periodic save every {SAVE_STEPS} steps. Times count from the "
            "signal.\n"
            "   Lost without lastcall: with these periodic saves alone / with no checkpoints at all.\n",
            flush=True,
        )
        row(
            "what happened",
            "resumes from",
            "size",
            "saved",
            "gone",
            "exit",
            "lost",
            "lost without lastcall, in steps",
        )
        lives = preempted(folder, blows(random.Random(args.seed)), pace)
        one, other = ((folder / f"{which}.result").read_text() for which in ("reference", "preempted"))
        print(f"\n   finished in incarnation {lives} with exit code 0\n\n3. Final states, as SHA-256:")
        for mine, theirs in zip(one.splitlines(), other.splitlines(), strict=True):
            name, digest = mine.split()
            verdict = "same" if mine == theirs else "DIFFERENT"
            print(f"   {name:12} {digest[:16]}  {theirs.split()[1][:16]}  {verdict}")
    print(f"\n({time.monotonic() - began:.0f} s in all)")
    if one != other:
        print("The final states differ.")
        sys.exit(1)
    print("The final states are identical, bit for bit.")


if __name__ == "__main__":
    main()
