"""One life of a run for each fault, forked from here without importing torch again; a line of JSON for each.

    python operations.py FOLDER SHARD SHARDS KIND [KIND ...]

A life: a start that resumes, a periodic save, a SIGTERM, a just-in-time save, the pruning of what is old.
KIND is what goes wrong:

    kill            SIGKILL at each file operation in turn
    ENOSPC, EIO     each operation in turn answers with that error, once; `mixed`: with one of the two
    fsync, short    each fsync fails, each write is short
    lasting         from one operation on, every sixth in turn, all of them answer that the disk is full

After each life another one starts, without faults, and checks that it gets a state that belongs together.
Several of these scripts can share the work: each does every SHARDS-th fault.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import torch

import lastcall
from lastcall import testing
from lastcall.storage.files import Files

NUMBERS = 300_000  # 1.2 MB a file: enough for direct writes and spare space
DONE = re.compile(r"checkpoint of step (\d+) completed")


def fresh() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weights = torch.nn.Parameter(torch.zeros(NUMBERS))
    return weights, torch.optim.SGD([weights], lr=0.1, momentum=0.5)


def train(weights: torch.nn.Parameter, optimizer: torch.optim.Optimizer, step: int) -> None:
    weights.grad = torch.full_like(weights, step + 1.0)
    optimizer.step()


def settle() -> None:
    """Wait for what lastcall does in the background, so that operations come in the same order every time."""
    for thread in threading.enumerate():
        if thread.name in ("lastcall-space", "lastcall-periodic"):
            thread.join()


def live(directory: Path, files: Files, until: int) -> None:
    """Train up to a step and be told to stop there."""
    weights, optimizer = fresh()
    config = lastcall.JITCheckpointConfig(kill_wait=0, threads=2)
    periodic = lastcall.PeriodicCheckpointConfig(save_steps=2, save_total_limit=2)
    with lastcall.protect(
        directory, config=config, periodic=periodic, files=files, weights=weights, optimizer=optimizer
    ) as run:
        for step in run.steps(100):
            settle()
            train(weights, optimizer, step)
            if step + 1 == until:
                os.kill(os.getpid(), signal.SIGTERM)
                while not run._driver.session.open:
                    threading.Event().wait(0.001)


def check(directory: Path, at_least: int, answer: Path) -> None:
    """Resume, and compare with what that many steps lead to."""
    weights, optimizer = fresh()
    config = lastcall.JITCheckpointConfig(threads=1)
    with lastcall.protect(directory, config=config, weights=weights, optimizer=optimizer) as run:
        resumed = run.resumed or 0
        expected, reference = fresh()
        for step in range(resumed):
            train(expected, reference, step)
        assert torch.equal(weights, expected), f"step {resumed} is torn"
        if resumed:
            moments = [
                optimizer.state[weights]["momentum_buffer"],
                reference.state[expected]["momentum_buffer"],
            ]
            assert torch.equal(*moments), f"the moments of step {resumed} are torn"
        assert resumed >= at_least, f"resumed at {resumed}, but {at_least} was committed"
        answer.write_text(str(resumed))
        os._exit(0)


def forked(log: Path, what: object, *arguments: object) -> int:
    """Do it in a child; its return code as subprocess gives it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(fd, 2)
        what(*arguments)
        code = 0
    except SystemExit as left:
        code = left.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def count(directory: Path, answer: Path) -> None:
    files = testing.FaultyFiles()
    try:
        live(directory, files, 5)
    finally:
        answer.write_text(json.dumps({"any": files.total, **files.calls}))


def faults(kind: str, calls: Counter[str]) -> list[testing.Fault]:
    every = range(1, calls["any"] + 1)
    match kind:
        case "kill":
            return [testing.Fault("any", number, kill=True) for number in every]
        case "short":
            return [testing.Fault("pwrite", number, short=True) for number in range(1, calls["pwrite"] + 1)]
        case "fsync":
            return [testing.Fault("fsync", number) for number in range(1, calls["fsync"] + 1)]
        case "mixed":
            codes = (errno.ENOSPC, errno.EIO)
            return [testing.Fault("any", number, codes[number % 2]) for number in every]
        case "lasting":
            return [testing.Fault("any", number, errno.ENOSPC, lasting=True) for number in every[::6]]
        case _:
            return [testing.Fault("any", number, getattr(errno, kind)) for number in every]


def main(folder: Path, shard: int, shards: int, kinds: list[str]) -> None:
    base, work, log, answer = (folder / name for name in ("base", "work", "log", "answer"))
    assert forked(log, live, base, Files(), 3) == 75, log.read_text()
    shutil.copytree(base, work)
    assert forked(log, count, work, answer) == 75, log.read_text()
    calls = Counter(json.loads(answer.read_text()))
    print(json.dumps({"calls": calls}), flush=True)
    for kind in kinds:
        for fault in faults(kind, calls)[shard::shards]:
            shutil.rmtree(work)
            shutil.copytree(base, work)
            code = forked(log, live, work, testing.FaultyFiles(fault), 5)
            said = log.read_text()
            committed = max([3, *map(int, DONE.findall(said))])
            answer.unlink(missing_ok=True)
            checked = forked(log, check, work, committed, answer)
            resumed = int(answer.read_text()) if answer.exists() else None
            result = {
                "kind": kind,
                "number": fault.number,
                "code": code,
                "resumed": resumed,
                "checked": checked,
            }
            wrong = {} if checked == 0 else {"log": said + log.read_text()}
            print(json.dumps({**result, **wrong}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
