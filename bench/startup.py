"""What the bootstrap adds to the start of a Python process that never trains: `python -c pass`, in pairs with
a bare one, in a new order each round, and the median of their differences.

"control" is a second bare start and shows what the method itself cannot tell apart.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from bench import measure
from bench.table import Listing
from lastcall.auto import environment

_STARTS_A_ROUND = 40
_PTH = "lastcall-auto.pth"
_NOT_OURS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # an installed package is compiled


def _environments() -> dict[str, dict[str, str]]:
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LASTCALL_") and name not in _NOT_OURS
    }
    on = {**bare, "LASTCALL_ENABLED": "1"}
    ways = {"bare": bare, "control": bare, "lastcall run": {**on, **environment.additions(on)}}
    if os.path.exists(os.path.join(sysconfig.get_path("purelib"), _PTH)):
        ways |= {"switched off": {**bare, "LASTCALL_ENABLED": "0"}, "LASTCALL_ENABLED=1": on}
    return ways


def _start(environ: dict[str, str]) -> float:
    """Microseconds. Like a launcher would: fork, exec, wait."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", "pass"], env=environ)
    code = process.wait()
    taken = (time.perf_counter() - start) * 1e6
    if code != 0:
        raise RuntimeError(f"python -c pass ended with {code}")
    return taken


def startup(folder: Path, options: measure.Options) -> Listing:
    report = Listing("startup", "Start of a Python process that never trains", ("what", "µs", ""))
    ways = {
        name: environ
        for name, environ in _environments().items()
        if name in ("bare", "control") or options.keeps("lastcall")
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(options.seed)
    for environ in ways.values():
        _start(environ)  # compiled files and page cache
    for _ in range(_STARTS_A_ROUND * options.rounds):
        for name in order.sample(sorted(ways), len(ways)):
            times[name].append(_start(ways[name]))
    report.add("bare python -c pass", statistics.median(times["bare"]))
    remarks = {
        "lastcall run": "added; the promise is 5000 at most",
        "LASTCALL_ENABLED=1": "added; the promise is 5000 at most",
    }
    for name in list(ways)[1:]:
        added = statistics.median(one - bare for one, bare in zip(times[name], times["bare"], strict=True))
        report.add(
            "control: bare against bare" if name == "control" else f"lastcall: {name}",
            added,
            remarks.get(name, "added"),
        )
    if "LASTCALL_ENABLED=1" not in ways and options.keeps("lastcall"):
        report.notes.append(
            f"{_PTH} is not installed here, so only the way of `lastcall run` is measured: run `make env`."
        )
    report.notes.append(f"{len(times['bare'])} starts of each; medians of paired differences.")
    return report
