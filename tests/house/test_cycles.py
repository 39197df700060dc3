"""No module imports, by whatever way, one that imports it: inside functions and for the type checker, too."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}
KNOWN = {
    ("lastcall.adapters.torch.run", "lastcall.adapters.accelerate.run"),  # protect(accelerator=...)
    ("lastcall.adapters.ray.driver.patch", "lastcall.adapters.ray.driver.config"),
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in MODULES else node.module


def test_no_module_imports_one_that_imports_it() -> None:
    graph = {
        # the package itself has all public names, and loads them when they are asked for
        name: {other for other in imported(path) if other in MODULES and other not in (name, "lastcall")}
        for name, path in MODULES.items()
        if name != "lastcall"
    }
    for name, other in KNOWN:
        assert other in graph[name], f"{name} does not import {other} any more: strike it from KNOWN"
        graph[name].remove(other)
    graphlib.TopologicalSorter(graph).prepare()
