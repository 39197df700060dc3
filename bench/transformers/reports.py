"""The benchmarks of Trainer by name, where Transformers is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bench.measure import Options
from bench.table import Comparison, Listing


def missing(name: str) -> Listing | None:
    gone = [
        package for package in ("transformers", "accelerate") if importlib.util.find_spec(package) is None
    ]
    if not gone:
        return None
    report = Listing(name, "Trainer", ("what",))
    report.notes.append(f"{name} skipped: pip install {' '.join(gone)}")
    return report


def run(name: str, folder: Path, gigabytes: float, options: Options) -> Comparison | Listing:
    from bench.transformers import saves, stalls, steps

    if report := missing(name):
        return report
    own = folder / name
    own.mkdir()
    match name:
        case "trainer-save":
            return saves.save(own, gigabytes, options)
        case "trainer-stall":
            return stalls.periodic(own, gigabytes, options)
        case _:
            return steps.step(own, options)
