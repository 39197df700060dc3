"""What a step of a train worker costs more: with lastcall in the process, and with Ray's own
get_preemption_info() in the loop."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from bench import measure
from bench.agreement import Report
from bench.measure import Options
from helpers.ray.cluster import Cluster
from helpers.ray.runs import PROTECTED

_PACE = Path(__file__).with_name("pace.py")
WAYS = {  # whether the loop asks, and whether lastcall is on
    "control: bare against bare": ("no", "0"),
    "lastcall": ("no", "1"),
    "Ray's get_preemption_info() in every step": ("yes", "0"),
}


def steps(folder: Path, options: Options) -> Report:
    report = Report(
        "ray-step", "Ray Train: a DDP step of two workers, quiet", ("what", "bare step, µs", "added, µs")
    )
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with Cluster(cpus=4) as cluster:
        for number in range(options.rounds):
            for place, (name, (asks, enabled)) in enumerate(WAYS.items()):
                out = folder / f"{number}-{place}.json"
                env = {**PROTECTED, "RAY_TRAIN_JIT_CHECKPOINT_ENABLED": enabled}
                driver = cluster.run(_PACE, out, asks, folder, **env)
                assert driver.wait() == 0, driver.said()[-2000:]
                found[name] += json.loads(out.read_text())
                measure.progress(f"ray-step: {name}: {_added(found[name]):.0f} µs added")
    for name, pairs in found.items():
        report.rows.append(
            (name, f"{statistics.median(bare for bare, _ in pairs) * 1e6:.0f}", f"{_added(pairs):.0f}")
        )
        report.samples[name] = [full - bare for bare, full in pairs]
    report.notes.append(
        f"Medians of paired differences of blocks of steps on rank 0, {options.rounds} "
        "interleaved runs of each."
    )
    return report


def _added(pairs: list[tuple[float, float]]) -> float:
    """Microseconds."""
    return statistics.median(full - bare for bare, full in pairs) * 1e6
