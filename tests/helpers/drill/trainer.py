"""A training process as the drill sees one, without a framework: joins the registry, writes events, saves
real checkpoints.

python trainer.py DIRECTORY [--steps N] [--fault NAME]

Faults: `elsewhere` takes a new directory each time, `crash` dies on the second start, `leave` leaves by
itself, `stall` never does a step, `stand` does ten and no more, `unsaved` says that it cannot save, `inexact`
saves inexactly, `zero` leaves with 0 after a save, `disk` loses what it saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from helpers.core.bare_core import State, World
from lastcall import clock, events
from lastcall.core.process import registry
from lastcall.core.save.saver import Request
from lastcall.types import Kind

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--fault", default="")
args = parser.parse_args()

started = args.directory / "started"
args.directory.mkdir(parents=True, exist_ok=True)
again = started.exists()
started.touch()
root = args.directory / f"run-{os.getpid()}" if args.fault == "elsewhere" else args.directory
if args.fault == "crash" and again:
    sys.exit("no module named nowhere")

stop: list[int] = []
signal.signal(signal.SIGTERM, lambda signum, frame: stop.append(signum))
state = State()
with World(root) as world:
    log = events.EventLog(root / ".lastcall" / "events-0.jsonl", clock.Clock())
    entry = world.restore(state)
    step = entry.record.step if entry else 0
    membership = registry.Membership.of_environment(root)
    assert membership is not None
    membership.update(step=step, resumed=step if entry else None)
    log.emit("start", incarnation=1, resumed=entry.path.name if entry else None, seconds=0.01)
    log.flush()
    print("joined", flush=True)
    outcome, code = "finished", 0
    while step < args.steps:
        time.sleep(0.01)
        if args.fault == "stall" or (args.fault == "stand" and step >= 10):
            continue
        step += 1
        membership.update(step=step)
        if args.fault == "leave" and step == 5:
            sys.exit(9)
        if not stop:
            continue
        log.emit("notice", source="signal", reason="SIGTERM", deadline_in=30.0)
        outcome, code = "saved", 0 if args.fault == "zero" else 75
        if args.fault == "unsaved":
            log.emit("not-saved", save="jit", because="the disk is full")
            outcome, code = "not saved", 1
            break
        state.step(step)
        log.emit("save-begins", save="jit", step=step, bytes=1)
        capture = state.capture(step)
        if args.fault == "inexact":
            capture = dataclasses.replace(capture, exact=False, because="in the middle of a step")
        made = world.saver.save(capture, Request(Kind.JIT, "SIGTERM"))
        log.emit("committed", save="jit", step=step, exact=made.record.exact, path=made.path.name)
        if args.fault == "disk":
            shutil.rmtree(made.path)
        break
    log.emit("stop", outcome=outcome, step=step)
    log.close()
    membership.update(outcome=outcome)
sys.exit(code)
