"""Modules that people import by names which Ray does not have: those that the announcement of its JIT checkpointing uses.

A finder at the end of `sys.meta_path`, where only a module arrives that nobody else has found: if Ray ever ships one, Ray's is used.
It is in `lastcall-auto.pth` and there without any variable, since such a script asks for protection in its code. This here is only
imported when somebody imports such a name.

Standard library only, and of that only what the interpreter has loaded by itself: see `bootstrap`.
"""

import sys

TYPE_CHECKING = False  # typing would cost more than all the rest
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# The module that is asked for -> "module:function" of ours, which fills it.
ALIASES = {"ray.train._internal.jit_checkpoint_config": "lastcall.adapters.ray.driver.config:publish"}


class Loader:
    def create_module(self, spec: "ModuleSpec") -> None:
        """As usual."""

    def exec_module(self, module: "ModuleType") -> None:
        home, _, attribute = ALIASES[module.__name__].partition(":")
        __import__(home)
        getattr(sys.modules[home], attribute)(module)


def spec(name: str) -> "ModuleSpec | None":
    if name not in ALIASES:
        return None
    kind: type[ModuleSpec] = type(sys.__spec__)  # importlib.machinery would have to be imported
    return kind(name, Loader(), origin="lastcall")  # type: ignore[arg-type]
