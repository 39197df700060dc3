"""`python -m bench`: choose, run, print. Exit 0: all measured; 1: lastcall itself could not be measured; 2:
cannot run here."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import agreement, disk, gpu, kube, resume, save, stall, startup, step
from bench.conditions import conditions
from bench.measure import Options
from bench.ranks import reports as ranks
from bench.ray import reports as rays
from bench.table import Comparison, Listing
from bench.transformers import reports as trainer

_SIZES = {
    "save": 4.26,
    "small": 0.6,
    "frozen": 2.0,
    "stall": 2.0,
    "resume": 4.26,
    "step": 0.0,
    "startup": 0.0,
    "gpu": 8.0,
    "agreement": 0.0,
    "traffic": 0.0,
    "ranks-save": 2.0,
    "ranks-load": 2.0,
    "ranks-load-warm": 2.0,
    "ranks-step": 0.0,
    "notice-ranks": 0.0,
    "trainer-save": 0.6,
    "trainer-stall": 0.6,
    "trainer-step": 0.0,
    "ray-notice": 0.0,
    "ray-step": 0.0,
    "kube-webhook": 0.0,
}
_FOLDER = "lastcall-bench-"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Speed of lastcall beside its peers and the raw limit."
    )
    parser.add_argument(
        "names", nargs="*", default="all", choices=[*_SIZES, "all"], help="which benchmarks (all)"
    )
    parser.add_argument("--size", type=float, help=f"GB of state; by default {_SIZES}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, default=Path(__file__).parent / "out", help="on the disk to measure"
    )
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out methods whose name contains this",
    )
    parser.add_argument("--markdown", action="store_true", help="tables for a README")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the ranks-... benchmarks (2)")
    parser.add_argument(
        "--drop-caches", action="store_true", help="drop the machine's page cache before each run; needs root"
    )
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {given.rounds}")
    if not 2 <= given.ranks <= 64:
        parser.error(f"--ranks must lie between 2 and 64, not {given.ranks}")
    if given.size is not None and not 0 < given.size < 1000:
        parser.error(f"--size is in GB and must lie between 0 and 1000, not {given.size}")
    return given


@contextlib.contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """A folder of our own, removed at the end; one that a killed benchmark left is removed at the start."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_FOLDER}*"):
        number = left.name.removeprefix(_FOLDER)
        if number.isdigit() and not Path(f"/proc/{number}").exists():
            disk.clear(left)
    own = folder / f"{_FOLDER}{os.getpid()}"
    own.mkdir()
    try:
        yield own
    finally:
        disk.clear(own)


def _run(
    name: str, folder: Path, gigabytes: float, options: Options
) -> Comparison | Listing | agreement.Report:
    match name:
        case "save":
            return save.save(folder, gigabytes, options)
        case "small":
            return save.small(folder, gigabytes, options)
        case "frozen":
            return save.frozen(folder, gigabytes, options)
        case "stall":
            return stall.stall(folder, gigabytes, options)
        case "resume":
            return resume.resume(folder, gigabytes, options)
        case "startup":
            return startup.startup(folder, options)
        case "gpu":
            return gpu.gpu(folder, gigabytes, options)
        case "kube-webhook":
            return kube.webhook(folder, options)
        case "agreement":
            return agreement.processes(folder, options)
        case "traffic":
            return agreement.simulation(folder, options)
        case "ranks-save":
            return ranks.save(folder, gigabytes, options)
        case "ranks-load" | "ranks-load-warm":
            return ranks.load(folder, gigabytes, options, warm=name == "ranks-load-warm")
        case "ranks-step":
            return ranks.step(folder, options)
        case "notice-ranks":
            return ranks.notices(folder, options)
        case "trainer-save" | "trainer-stall" | "trainer-step":
            return trainer.run(name, folder, gigabytes, options)
        case "ray-notice" | "ray-step":
            return rays.run(name, folder, options)
        case _:
            return step.step(folder, options)


def main(argv: list[str] | None = None) -> int:
    given = _arguments(argv)
    names = list(_SIZES) if "all" in given.names else list(dict.fromkeys(given.names))
    options = Options(given.rounds, tuple(given.without), given.drop_caches, ranks=given.ranks)
    reports = []
    with _workspace(given.dir) as folder:
        here = conditions(given.dir)
        print(
            "\n".join(
                f"{name}: {value}  " if given.markdown else f"{name:8}{value}" for name, value in here.items()
            ),
            flush=True,
        )
        for name in names:
            size = _SIZES[name] if given.size is None else given.size
            try:
                report = _run(name, folder, size, options)
            except disk.NoSpace as error:
                print(f"bench: {error}", file=sys.stderr)
                return 2
            print(f"\n{report.render(given.markdown)}", flush=True)
            reports.append(report)
            if given.json:
                written = {"conditions": here, "reports": [report.as_json() for report in reports]}
                given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if any(report.failed for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
