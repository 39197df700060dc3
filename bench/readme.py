"""Puts measured numbers into docs/benchmarks.md, and three of them into README.md, so that none is typed in
by hand.

python -m bench save small frozen stall resume step --json FILE
python -m bench.readme FILE [FILE ...]    the summary of docs/benchmarks.md, then README.md
python -m bench.readme                    README.md alone, from the summary that stands there
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
WHAT = {
    "save": "save, from boundary to durable",
    "small": "save, many small tensors",
    "frozen": "save, most weights frozen",
    "stall": "training stopped by a periodic save",
    "resume": "resume, cold, into live tensors",
    "gpu": "save from a GPU",
    "ranks-save": "sharded save (FSDP2), all ranks",
    "ranks-load": "sharded load, cold, all ranks",
    "ranks-load-warm": "sharded load, warm, all ranks",
    "trainer-save": "Transformers' Trainer, from SIGTERM to durable",
    "trainer-stall": "Trainer stopped by a periodic save",
}

HEADLINES = {  # what README.md says of these rows; the rest of a line is taken from the row
    "save": ("to save {size}, from the end of a step until it is durable", "the raw limit of the disk"),
    "stall": ("for which a periodic save of {size} stops the training", "a plain copy in memory"),
    "resume": ("to resume from {size} that no cache holds", "a raw read"),
}


def seconds(method: dict[str, Any]) -> float:
    return float(statistics.median(sample["seconds"] for sample in method["samples"]))


def row(report: dict[str, Any]) -> str:
    def fastest(kind: str) -> dict[str, Any] | None:
        return min(
            (m for m in report["methods"] if m["kind"] == kind and m["samples"]), key=seconds, default=None
        )

    def cell(method: dict[str, Any] | None, ours: float) -> str:
        return (
            ""
            if method is None
            else f"{seconds(method):.3g} s ({seconds(method) / ours:.2g}x) {method['name']}"
        )

    ours = fastest("lastcall")
    assert ours is not None, f"{report['name']} has no row of ours"
    own = seconds(ours)
    what = f"{WHAT[report['name']]}, {report['bytes'] / 1e9:.2f} GB"
    return f"| {what} | **{own:.3g} s** | {cell(fastest('limit'), own)} | {cell(fastest('peer'), own)} |"


def costs(found: list[dict[str, Any]]) -> list[str]:
    """What a step costs while nothing happens, in a sentence for each row of ours."""
    rows: list[dict[str, Any]] = next(
        (report["rows"] for one in found for report in one["reports"] if report["name"] == "step"), []
    )
    own = [
        f"{each['what'].removeprefix('lastcall: ')} {each['microseconds']:.1f} µs"
        for each in rows
        if each["what"].startswith("lastcall")
    ]
    bare = [f"{each['microseconds']:.0f} µs" for each in rows if each["what"].startswith("bare")]
    return [f"Per step, beside a bare step of {bare[0]}: {'; '.join(own)}."] if own and bare else []


def summary(found: list[dict[str, Any]]) -> str:
    lines = ["| | lastcall | raw limit | fastest peer |", "|---|---|---|---|"]
    lines += [row(report) for one in found for report in one["reports"] if "methods" in report]
    lines += [
        "",
        "Medians of interleaved rounds; in brackets, how many times lastcall's time.",
        *costs(found),
    ]
    where = found[0]["conditions"]
    dates = sorted(one["conditions"]["date"] for one in found)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    parts = [where["kernel"], where["cores"], where["memory"], where["disk"].split(" at ")[0], where["torch"]]
    lines.append(f"Measured on {when}: {', '.join(parts)}.")
    return "\n".join(lines)


_ROW = re.compile(
    r"\| (?P<what>[^|]+), (?P<size>[\d.]+ GB) \| \*\*(?P<own>[\d.]+) s\*\* "
    r"\| (?P<limit>[\d.]+) s [^|]*\| [\d.]+ s \((?P<faster>[\d.]+)x\) (?P<peer>[^|]+?) \|"
)


def headlines(table: str) -> str:
    """Three rows of the summary, as a sentence each."""
    rows = {match["what"]: match for match in _ROW.finditer(table)}
    lines = []
    for name, (what, limit) in HEADLINES.items():
        row = rows[WHAT[name]]
        times = f"{float(row['own']) / float(row['limit']):.1f} times {limit}"
        faster = f"{row['faster']} times as fast as the fastest peer ({row['peer']})"
        lines.append(f"- **{row['own']} s** {what.format(size=row['size'])}: {times}, {faster}")
    return "\n".join(lines)


def measured(path: Path) -> str:
    """What stands between the markers of this page."""
    return path.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def put(path: Path, text: str) -> None:
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main(paths: list[str]) -> None:
    if paths:
        put(PAGE, summary([json.loads(Path(path).read_text()) for path in paths]))
    put(README, headlines(measured(PAGE)))


if __name__ == "__main__":
    main(sys.argv[1:])
