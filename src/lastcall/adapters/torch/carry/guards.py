"""Flags that say that something is open: `if not self.opened: self.file = open(path); self.opened = True`.

A connection or a pool of threads cannot be saved; a resumed script opens it again. It would not, and fail, if
the flag came back without it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping

from lastcall.adapters.torch.carry.clocks import last_name
from lastcall.script.source.scopes import assignments


def is_guard(name: str, where: ast.AST, is_lost: Callable[[str], bool]) -> bool:
    """Whether a variable or attribute that is True now is set to it where something else is assigned that is
    not saved (`is_lost`)."""
    return any(is_lost(other) for other in _beside(where).get(name, ()))


@functools.lru_cache(maxsize=256)
def _beside(where: ast.AST) -> Mapping[str, frozenset[str]]:
    """By name that is set to True: the names that the same statements assign."""
    found: dict[str, frozenset[str]] = {}
    for node in ast.walk(where):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            pairs = [(last_name(to), value) for each in block for to, value in assignments(each)]
            for name, value in pairs:
                if isinstance(value, ast.Constant) and value.value is True:
                    others = frozenset(other for other, _ in pairs if other != name)
                    found[name] = found.get(name, frozenset()) | others
    return found
