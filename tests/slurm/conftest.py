"""These tests need a Slurm installation and two minutes: they run when asked for by name (make e2e-slurm),
not with all others."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [
        (config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args
    ]
    return None if any(path == HERE or HERE in path.parents for path in named) else True
