"""One rank of a crew: `python -m bench.ranks.member WORK ARGUMENTS` reads what to do, line by line, and
answers each line."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench import meters
from bench.measure import Method
from bench.ranks import loads, saves, steps
from bench.state import State

_TIMEOUT = datetime.timedelta(minutes=10)
Handlers = dict[str, Callable[..., object]]


def _of_methods(found: list[Method], state: State) -> Handlers:
    by_name = {method.name: method for method in found}

    def run(name: str) -> dict[str, float]:
        dist.barrier()
        with meters.Meter() as meter:
            timing = by_name[name].run()
        return {
            "seconds": meter.seconds if timing is None else timing.seconds,
            "cpu": meter.cpu,
            "peak": meter.peak,
        }

    def before(name: str) -> None:
        meters.trim()
        by_name[name].before()

    return {
        "methods": lambda: [(method.name, method.kind.value, method.family) for method in found],
        "bytes": lambda: state.nbytes,
        "described": lambda: state.described,
        "touch": state.touch,
        "setup": lambda name: by_name[name].setup(),
        "before": before,
        "run": run,
        "after": lambda name: by_name[name].after(),
        "close": lambda name: by_name[name].close(),
    }


def _handlers(work: str, arguments: dict[str, Any]) -> Handlers:
    folder = Path(arguments["folder"])
    if work == "steps":
        return {
            "ddp": lambda pairs, seconds: steps.ddp(folder, pairs, seconds),
            "small": lambda pairs, seconds: steps.small(folder, pairs, seconds),
        }
    state = saves.sharded(arguments["gigabytes"])
    found = (
        saves.methods(state, folder)
        if work == "save"
        else loads.methods(state, folder, warm=arguments["warm"])
    )
    return _of_methods(found, state)


def main(work: str, arguments: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    handlers = _handlers(work, arguments)
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = {"answer": handlers[told.pop("what")](**told)}
        except BaseException as error:  # DCP's CheckpointException is no Exception
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
