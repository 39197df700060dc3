"""Loops and data pipelines as people write them: resumed bit for bit, or warned of before anything is lost.
The rows are in tests/shapes; helpers/data/pipelines.py says how they are played."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from helpers.data import pipelines
from helpers.processes.forkserver import Nursery

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "shapes").glob("*.py"))
for _module in MODULES:
    importlib.import_module(f"shapes.{_module}")


def _rows() -> list[object]:
    return [
        pytest.param(row.name, marks=[pytest.mark.slow] if row.slow else [], id=row.name)
        for row in pipelines.TABLE.values()
    ]


def test_every_case_of_the_findings_has_a_row() -> None:
    """G: the 161 data pipelines, by the names that they had there."""
    listed = Path(pipelines.__file__).with_name("pipelines_cases.txt").read_text().splitlines()
    rebuilt = {
        case
        for row in pipelines.TABLE.values()
        for case in ((row.case,) if isinstance(row.case, str) else row.case)
    }
    assert rebuilt == {line for line in listed if not line.startswith("#")}
    assert len(rebuilt) == 161


@pytest.mark.parametrize("name", _rows())
def test_row(name: str, nursery: Nursery, tmp_path: Path) -> None:
    for module in pipelines.TABLE[name].needs:
        pytest.importorskip(module)
    child = nursery.run(
        tmp_path,
        Path(pipelines.__file__).with_name("pipelines_child.py"),
        f"shapes.{name.partition('.')[0]}",
        name,
    )
    assert child.code == 0 and child.lines(), child.log()
    told = json.loads(child.lines()[-1])
    assert not told["wrong"], "\n".join([*told["wrong"], "", child.log()[-6000:]])
