"""Tables for a terminal and for the README, the sentence under them, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.measure import Kind, Result


def lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool, left: Sequence[int] = (0,)
) -> list[str]:
    """Columns of text (`left`) to the left, numbers to the right."""
    columns = range(len(header))
    if markdown:
        rule = "|" + "|".join("---" if column in left else "---:" for column in columns) + "|"
        return [_piped(header), rule, *(_piped(row) for row in rows)]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in columns]

    def aligned(row: Sequence[str]) -> str:
        cells = (row[c].ljust(widths[c]) if c in left else row[c].rjust(widths[c]) for c in columns)
        return "  ".join(cells).rstrip()

    return [aligned(header), "-" * (sum(widths) + 2 * len(widths) - 2), *(aligned(row) for row in rows)]


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


@dataclass
class Comparison:
    """Methods that did the same job."""

    name: str
    title: str
    nbytes: int
    results: list[Result]
    limit: str = "raw limit"
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Ours could not be measured: the one row that must not go missing unnoticed."""
        return any(result.kind is Kind.OURS and result.failure for result in self.results)

    def fastest(self, kind: Kind) -> Result | None:
        measured = [result for result in self.results if result.kind is kind and result.failure is None]
        return min(measured, key=lambda result: result.median, default=None)

    def shown(self) -> list[Result]:
        """The fastest of each family, fastest first."""
        best: dict[str, Result] = {}
        for result in self.results:
            if result.failure is None and (
                result.family not in best or result.median < best[result.family].median
            ):
                best[result.family] = result
        return sorted(best.values(), key=lambda result: result.median)

    def render(self, markdown: bool) -> str:
        limit, ours = self.fastest(Kind.LIMIT), self.fastest(Kind.OURS)
        header = [
            "method",
            "median s",
            "best s",
            f"x {self.limit}",
            "x lastcall",
            "CPU s/GB",
            "peak extra MB",
        ]
        rows = [
            [
                f"**{result.name}**" if markdown and result.kind is Kind.OURS else result.name,
                _seconds(result.median),
                _seconds(result.best),
                f"{result.median / limit.median:.2f}" if limit else "-",
                f"{result.median / ours.median:.2f}" if ours else "-",
                f"{result.cpu / (self.nbytes / 1e9):.2f}",
                f"{result.peak / 1e6:.0f}",
            ]
            for result in self.shown()
        ]
        heading = f"### {self.title}" if markdown else self.title
        body = lines(header, rows, markdown)
        return "\n".join(
            [heading, "", *body, "", *(f"{line}  " if markdown else line for line in self._remarks())]
        )

    def headline(self) -> str | None:
        limit, ours, peer = (self.fastest(kind) for kind in (Kind.LIMIT, Kind.OURS, Kind.PEER))
        if ours is None:
            return None
        parts = []
        if limit:
            parts.append(f"{ours.median / limit.median:.2f} times the {self.limit} ({limit.name})")
        if peer:
            parts.append(f"{peer.median / ours.median:.1f} times as fast as the fastest peer ({peer.name})")
        parts += [
            f"{result.median / ours.median:.1f} times as fast as {result.name}"
            for result in self.results
            if result.name.startswith("torch.save") and result.kind is Kind.PEER and not result.failure
        ]
        return f"lastcall is {'; '.join(parts)}." if parts else None

    def _remarks(self) -> list[str]:
        rounds = max((len(result.samples) for result in self.results), default=0)
        returns = [
            f"{r.name} returns after {_seconds(r.returned)} s."
            for r in self.shown()
            if r.returned is not None
        ]
        missing = [f"not measured: {r.name}: {r.failure}" for r in self.results if r.failure]
        headline = self.headline()
        remarks = [
            f"Medians of {rounds} interleaved round{'s' if rounds != 1 else ''}.",
            *returns,
            *self.notes,
            *missing,
        ]
        return [*remarks, *([headline] if headline else [])]

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "title": self.title,
            "bytes": self.nbytes,
            "limit": self.limit,
            "notes": self.notes,
            "headline": self.headline(),
            "methods": [
                {
                    "name": result.name,
                    "kind": result.kind.value,
                    "failure": result.failure,
                    "samples": [vars(sample) for sample in result.samples],
                }
                for result in self.results
            ],
        }


@dataclass
class Listing:
    """Numbers that are not methods of one job."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, float | None, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def add(self, what: str, microseconds: float | None, remark: str = "") -> None:
        self.rows.append((what, microseconds, remark))

    def render(self, markdown: bool) -> str:
        heading = f"### {self.title}" if markdown else self.title
        rows = [(what, "-" if value is None else f"{value:.2f}", remark) for what, value, remark in self.rows]
        body = [*lines(self.header, rows, markdown, left=(0, 2)), ""] if rows else []
        remarks = [*self.notes, *([f"not measured: lastcall: {self.failure}"] if self.failure else [])]
        return "\n".join([heading, "", *body, *remarks])

    def as_json(self) -> dict[str, object]:
        rows = [{"what": what, "microseconds": value, "remark": remark} for what, value, remark in self.rows]
        return {
            "name": self.name,
            "title": self.title,
            "rows": rows,
            "notes": self.notes,
            "failure": self.failure,
        }
