"""What a step of a train worker costs more: with lastcall in the process, and with Ray's own get_preemption_info() in the loop."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from bench import measure
from bench.agreement import Report
from bench.measure import Options
from helpers.ray_cluster import Cluster
from helpers.ray_runs import PROTECTED

_PACE = Path(__file__).with_name("pace.py")
WAYS = {
    "bare": ("no", "0"),
    "lastcall": ("no", "1"),
    "Ray's get_preemption_info() in every step": ("yes", "0"),
}


def steps(folder: Path, options: Options) -> Report:
    report = Report("ray-step", "Ray Train: a DDP step of two workers, quiet", ("what", "median step, µs", "added, µs"))
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with Cluster(cpus=4) as cluster:
        for number in range(options.rounds):
            for name, (asks, enabled) in WAYS.items():
                out = folder / f"{number}-{len(found[name])}-{asks}-{enabled}.json"
                env = {**PROTECTED, "RAY_TRAIN_JIT_CHECKPOINT_ENABLED": enabled}
                driver = cluster.run(_PACE, out, asks, folder, **env)
                assert driver.wait() == 0, driver.said()[-2000:]
                found[name] += json.loads(out.read_text())
                measure.progress(f"ray-step: {name}: {statistics.median(found[name]) * 1e6:.0f} µs")
    bare = statistics.median(found["bare"])
    for name, times in found.items():
        median = statistics.median(times)
        report.rows.append((name, f"{median * 1e6:.0f}", "-" if name == "bare" else f"{(median - bare) * 1e6:.0f}"))
        report.samples[name] = times
    report.notes.append(
        f"Medians of blocks of steps of rank 0, in {options.rounds} interleaved runs each; differences of a few per cent are noise."
    )
    return report
