from __future__ import annotations

import pytest

from helpers.cli.fixtures import cli, make_run  # noqa: F401
from helpers.processes.forkserver import WIDE


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sentence on one line, and no colour; tests of the layout choose their own width."""
    monkeypatch.setenv("COLUMNS", WIDE)
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
