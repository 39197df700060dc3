"""The picture of the README: the demo's run, drawn from the events that it wrote.

python tools/timeline.py --record    run examples/demo.py, and keep its events in tools/timeline.jsonl
python tools/timeline.py --write     draw docs/timeline-light.svg and docs/timeline-dark.svg from them
python tools/timeline.py --check     fail if they are others
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from lastcall import events  # noqa: E402 - this checkout's, whichever one is installed

RECORDED = ROOT / "tools" / "timeline.jsonl"
KINDS = ("start", "notice", "save-begins", "committed", "stop")
SEED = "3"
TITLE = "Five preemptions of one run: each incarnation continues where the last one was saved"


@dataclass(frozen=True)
class Colours:
    paper: str
    ink: str
    faint: str
    line: str
    saved: str
    killed: str


THEMES = {
    "light": Colours("#ffffff", "#1f2328", "#d0d7de", "#0969da", "#1a7f37", "#cf222e"),
    "dark": Colours("#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#3fb950", "#ff7b72"),
}
WIDTH, HEIGHT = 860, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 46, 64


@dataclass
class Incarnation:
    resumed: str | None
    points: list[tuple[float, int]] = field(default_factory=list)
    saves: list[tuple[float, int, str]] = field(default_factory=list)  # when, the step, jit or periodic
    notice: tuple[float, int, str] | None = None
    outcome: str = "killed"  # the last word of one that had no time for it

    @property
    def end(self) -> tuple[float, int]:
        return self.points[-1]


def incarnations(said: Sequence[dict[str, Any]]) -> list[Incarnation]:
    lives: list[Incarnation] = []
    zero = said[0]["at"]
    for event in said:
        at, kind = event["at"] - zero, event["kind"]
        if kind == "start":
            resumed = event["resumed"]
            lives.append(Incarnation(resumed, [(at, int(resumed.rpartition("-")[2]) if resumed else 0)]))
            continue
        life = lives[-1]
        if kind == "committed":
            life.saves.append((at, event["step"], event["save"]))
        if kind == "notice":
            life.notice = (at, event["step"], event["reason"])
        if kind == "stop":
            life.outcome = event["outcome"]
        life.points.append((at, max(event["step"], life.end[1])))
    return lives


def drawing(lives: Sequence[Incarnation], colours: Colours) -> str:
    seconds = lives[-1].end[0]
    steps = max(life.end[1] for life in lives)

    def x(at: float) -> float:
        return round(LEFT + at / seconds * (WIDTH - LEFT - RIGHT), 1)

    def y(step: float) -> float:
        return round(HEIGHT - BOTTOM - step / steps * (HEIGHT - TOP - BOTTOM), 1)

    def parts() -> Iterator[str]:
        yield _text(
            LEFT,
            22,
            TITLE,
            colours.ink,
            14,
        )
        for step in range(0, steps + 1, 10):
            yield _line(LEFT, y(step), WIDTH - RIGHT, y(step), colours.faint)
            yield _text(LEFT - 8, y(step) + 4, str(step), colours.ink, 11, "end")
        for second in range(0, int(seconds) + 1, 10):
            yield _text(x(second), HEIGHT - BOTTOM + 16, f"{second} s", colours.ink, 11, "middle")
        for life, following in zip(lives, [*lives[1:], None], strict=True):
            path = " ".join(f"{x(at)},{y(step)}" for at, step in life.points)
            yield f'<polyline points="{path}" fill="none" stroke="{colours.line}" stroke-width="2.5"/>'
            for at, step, save in life.saves:
                radius = 2.5 if save in ("periodic", "final") else 4.5
                yield f'<circle cx="{x(at)}" cy="{y(step)}" r="{radius}" fill="{colours.saved}"/>'
            at, step = life.end
            if following is not None:
                begun, back = following.points[0]
                yield _line(x(at), y(step), x(begun), y(back), colours.ink, dashed=True)
                killed = life.notice is None
                colour = colours.killed if killed else colours.saved
                words = "SIGKILL" if killed else f"{life.notice[2] if life.notice else ''}: {back}"
                yield _text(x(at) - 6, y(step) - 10, words, colour, 11, "end" if x(at) > 120 else "start")
        low = HEIGHT - 18
        yield f'<circle cx="{LEFT + 5}" cy="{low - 4}" r="4.5" fill="{colours.saved}"/>'
        yield _text(LEFT + 16, low, "saved after the notice", colours.ink, 12)
        yield f'<circle cx="{LEFT + 175}" cy="{low - 4}" r="2.5" fill="{colours.saved}"/>'
        yield _text(LEFT + 184, low, "periodic save", colours.ink, 12)
        yield _line(LEFT + 290, low - 4, LEFT + 316, low - 4, colours.ink, dashed=True)
        yield _text(LEFT + 322, low, "gone, started again", colours.ink, 12)
        yield _text(
            WIDTH - RIGHT,
            low,
            f"steps over time; at the end, step {steps}: {lives[-1].outcome}",
            colours.ink,
            12,
            "end",
        )

    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" font-family="system-ui, sans-serif">'
    )
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{colours.paper}"/>'
    return "\n".join([head, paper, *parts(), "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, colour: str, size: int, anchor: str = "start") -> str:
    place = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}">{escape(words)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="3 3"' if dashed else ""
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}"{dash}/>'


def drawings() -> dict[Path, str]:
    said = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
    lives = incarnations(said)
    return {ROOT / "docs" / f"timeline-{name}.svg": drawing(lives, each) for name, each in THEMES.items()}


def record() -> None:
    with tempfile.TemporaryDirectory(prefix="lastcall-timeline-") as name:
        command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--seed", SEED, "--keep", name]
        subprocess.run(command, check=True)
        said = list(events.read(Path(name) / "preempted" / ".lastcall" / "events-0.jsonl"))
    lines = [json.dumps(event) for event in said if event["kind"] in KINDS]
    RECORDED.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The picture of the README, from the events of a demo.")
    parser.add_argument("--record", action="store_true", help="run the demo, and keep its events")
    parser.add_argument("--write", action="store_true", help="draw the pictures")
    parser.add_argument("--check", action="store_true", help="fail if they are others")
    args = parser.parse_args(arguments)
    if args.record:
        record()
    made = drawings()
    if args.write:
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
    old = [path.name for path, text in made.items() if not path.is_file() or path.read_text("utf-8") != text]
    if args.check and old:
        sys.stderr.write(
            f"{', '.join(old)}: not what the recorded events say: python tools/timeline.py --write\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
