from __future__ import annotations

from helpers.core.fixtures import place, root, small, world  # noqa: F401
