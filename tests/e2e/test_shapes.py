"""Loops and data pipelines as people write them: resumed bit for bit, or warned of before anything is lost.
The rows are in tests/shapes; helpers/pipelines.py says how they are played."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from helpers import pipelines
from helpers.nursery import Nursery

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "shapes").glob("*.py"))
for _module in MODULES:
    importlib.import_module(f"shapes.{_module}")


def _rows() -> list[object]:
    return [pytest.param(row.name, marks=[pytest.mark.slow] if row.slow else [], id=row.name) for row in pipelines.TABLE.values()]


@pytest.mark.parametrize("name", _rows())
def test_row(name: str, nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.run(tmp_path, Path(pipelines.__file__).with_name("pipelines_child.py"), f"shapes.{name.partition('.')[0]}", name)
    assert child.code == 0 and child.lines(), child.log()
    told = json.loads(child.lines()[-1])
    assert not told["wrong"], "\n".join([*told["wrong"], "", child.log()[-6000:]])
