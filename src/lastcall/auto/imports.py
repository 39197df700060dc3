"""Calls a function of ours right after a certain module has been imported, by any code and at any time.

Discarded: wrapping `builtins.__import__` (importlib does not go through it, and every import of the program
would pay); putting another loader into the module for good (`module.__loader__`, `importlib.resources` and
tracebacks would meet it).

So a finder in front of `sys.meta_path` that answers for the modules of its table only. It asks the other
finders, as the interpreter would, and lends the spec they give a loader that passes everything through, gives
the real loader back as soon as the module is executed, and calls the function afterwards.
`importlib.util.find_spec` alone executes nothing and so calls nothing.

Standard library only, and of that only what the interpreter has already loaded: see `bootstrap`.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False  # typing would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def warn(message: str) -> None:
    """One line on stderr. Logging is not loaded yet in most processes, and not ours to configure."""
    try:
        sys.stderr.write(f"lastcall: {message}\n")
    except Exception:  # stderr may be None, closed or full, and none of that is a reason to end a program
        pass


class Finder:
    """Waits for the modules of a table: name -> "module:function"."""

    def __init__(self, table: "Mapping[str, str]") -> None:
        self._table = dict(table)
        self._waiting = set(table)
        self._asking: set[tuple[int, str]] = set()  # by thread, since imports of other threads continue

    def install(self) -> None:
        """Modules that are already imported (another .pth may have done so) are handled at once."""
        sys.meta_path.insert(0, self)
        for name in list(self._table):
            module = sys.modules.get(name)
            if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                self.imported(name, module)

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self._table:
            return None
        asking = (get_ident(), name)
        if asking in self._asking:  # a finder that we asked asks all finders in turn
            return None
        self._asking.add(asking)
        try:
            spec = _ask_others(self, name, path, target)
        finally:
            self._asking.discard(asking)
        real: Any = getattr(spec, "loader", None)
        if spec is not None and hasattr(real, "exec_module") and type(real) is not PatchingLoader:
            spec.loader = PatchingLoader(self, spec, real)  # type: ignore[assignment]  # a Loader to all who look
        return spec

    def imported(self, name: str, module: "ModuleType") -> None:
        """A module of the table is complete. What our function raises is a warning."""
        function = self._table[name]
        try:
            home, _, attribute = function.partition(":")
            __import__(home)
            # a module may put another in its own place
            getattr(sys.modules[home], attribute)(sys.modules.get(name, module))
        except Exception as error:
            warn(f"{name} is left unpatched because {function} failed: {type(error).__name__}: {error}")
        self._waiting.discard(name)
        if not self._waiting:
            self._withdraw()

    def _withdraw(self) -> None:
        """Nothing left to wait for: leave the path. From then on a reloaded module stays unpatched.

        Not while there are other threads: one that walks along the path now would miss the finder after ours.
        Staying costs an import one look into a dictionary.
        """
        if len(sys._current_frames()) == 1 and self in sys.meta_path:
            sys.meta_path.remove(self)


class PatchingLoader:
    """Everything of the real loader, `isinstance` included, with an exec_module of our own."""

    def __init__(self, finder: Finder, spec: "ModuleSpec", real: "Any") -> None:
        self._finder = finder
        self._spec = spec
        self._real = real

    def exec_module(self, module: "ModuleType") -> None:
        # a lazy module would load itself on the plain way
        attributes = object.__getattribute__(module, "__dict__")
        self._spec.loader = self._real
        if attributes.get("__loader__") is self:
            attributes["__loader__"] = self._real
        self._real.exec_module(module)
        inner = self._spec.loader
        if object.__getattribute__(module, "__class__").__name__ == "_LazyModule" and inner is not self._real:
            # importlib.util.LazyLoader has only prepared it, and hung the loader for the first use into the
            # spec
            self._spec.loader = PatchingLoader(self._finder, self._spec, inner)  # type: ignore[assignment]
            return
        self._finder.imported(self._spec.name, module)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._real, name)

    @property  # type: ignore[misc]
    def __class__(self) -> "Any":
        return type(self._real)


def _ask_others(
    asker: Finder, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is not asker and find is not None:
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
    return None
