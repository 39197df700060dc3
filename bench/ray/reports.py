"""The benchmarks of Ray Train by name, where Ray is installed. The clusters are those of the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from bench.agreement import Report
from bench.measure import Options

TESTS = Path(__file__).resolve().parents[2] / "tests"


def run(name: str, folder: Path, options: Options) -> Report:
    report = Report(name, "Ray Train", ("what",))
    if importlib.util.find_spec("ray") is None:
        report.notes.append(f"{name} skipped: pip install -r requirements-ray.txt")
        return report
    if not options.keeps("lastcall"):
        report.notes.append("lastcall was left out, and without it there is nothing to compare.")
        return report
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from bench.ray import notices, steps

    own = folder / name
    own.mkdir()
    try:
        return notices.notices(own, options) if name == "ray-notice" else steps.steps(own, options)
    except (AssertionError, OSError) as error:
        report.failure = str(error).partition("\n")[0]
        return report
