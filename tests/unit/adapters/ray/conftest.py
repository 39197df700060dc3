"""Tests of what imports Ray are left out where it is not installed: `make e2e-ray` installs it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

NEED_RAY = (
    "driver/test_config.py",
    "driver/test_patch.py",
    "saves/test_protect.py",
    "saves/test_state.py",
    "saves/test_uncommitted.py",
    "test_callback.py",
    "test_controller.py",
    "worker/test_api_use.py",
    "worker/test_notices.py",
    "worker/test_preemption_info.py",
    "worker/test_reporting.py",
    "worker/test_responder.py",
)
_found = importlib.util.find_spec("ray")  # our own tests/ray is a package of that name, too, without a file
collect_ignore = [] if _found is not None and _found.origin else list(NEED_RAY)


@pytest.fixture
def storage(tmp_path: Any) -> Any:
    """A run's folder, as Ray's workers see it."""
    from ray.train.v2._internal.execution.storage import StorageContext

    return StorageContext(str(tmp_path / "storage"), "exp")
