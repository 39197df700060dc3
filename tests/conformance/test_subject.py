"""What every adapter promises to the core (core/subject.py), asked of each: a real training, stopped where
the test wants it, whose side threads are the test's."""

from __future__ import annotations

import pytest
