"""Findings of the doctor, each with its level and a remedy that can be pasted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Level = Literal["ok", "warning", "risk"]


@dataclass(frozen=True)
class Finding:
    """The verdict of one check."""

    name: str  # stable: programs match on it
    level: Level  # "risk": work would be lost; "warning": it has a cost, or cannot be checked from here
    says: str
    remedy: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


def ok(name: str, says: str, **facts: object) -> Finding:
    return Finding(name, "ok", says, "", facts)


def warning(name: str, says: str, remedy: str, **facts: object) -> Finding:
    return Finding(name, "warning", says, remedy, facts)


def risk(name: str, says: str, remedy: str, **facts: object) -> Finding:
    return Finding(name, "risk", says, remedy, facts)


@dataclass(frozen=True)
class Case:
    """The options of `lastcall doctor`."""

    environ: Mapping[str, str]
    directory: Path | None = None
    command: tuple[str, ...] = ()
    size: int | None = None  # bytes of the state, if given; overrides the size of the existing checkpoints
    # the platform's grace in seconds: it cannot be detected in a container
    termination_grace: float | None = None
    write_test: bool = True
    guard: bool = False


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 or value == int(value) else f"{value:.1f} s"
