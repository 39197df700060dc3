from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.core import mirrors
from helpers.core.bare_core import World
from helpers.core.mirrors import Watched
from lastcall.core.engine import writer


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 8192)
    monkeypatch.setattr(writer, "_DIRECT_FROM", 4096)  # small files are written as large ones are


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path / "run") as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a run."""
    (tmp_path / "run" / ".lastcall").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """That of a mirror."""
    return mirrors.watched(tmp_path / "place", monkeypatch)
