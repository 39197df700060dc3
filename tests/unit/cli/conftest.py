from __future__ import annotations

from helpers.cli.fixtures import cli, make_run  # noqa: F401
