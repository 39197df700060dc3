"""What came of each finding about Transformers' own callback: a table at the end of the run, whichever
process has played it."""

from __future__ import annotations

from typing import Any

import pytest

Rows = dict[str, dict[str, str]]  # finding -> column -> what came of it

_KEY = pytest.StashKey[Rows]()
_OUTPUT = "findings"
_NOT_RUN = "not run here (make test-slow)"


def of(config: pytest.Config) -> Rows:
    return config.stash.setdefault(_KEY, {})


def hand_over(config: pytest.Config) -> None:
    """In a worker of pytest-xdist: to the process that prints. Elsewhere there is nobody to hand it to."""
    output: dict[str, Any] | None = getattr(config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = of(config)


def take_over(config: pytest.Config, worker: Any) -> None:
    for name, cells in getattr(worker, "workeroutput", {}).get(_OUTPUT, {}).items():
        of(config).setdefault(name, {}).update(cells)


def write(reporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = of(config)
    if not rows:
        return
    reporter.section("findings about Transformers' own callback: theirs and ours")
    wide = max(len(name) for name in rows)
    for name, cells in rows.items():
        reporter.write_line(f"{name:{wide}}  Transformers: {cells.get('hf', _NOT_RUN)}")
        reporter.write_line(f"{'':{wide}}  lastcall:     {cells.get('lastcall', _NOT_RUN)}")
