"""A notice came while something was waited for."""

from __future__ import annotations


class Stopped(Exception):
    """A notice came, here or to another rank: what was waited for has no use any more."""
