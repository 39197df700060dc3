"""Aliases for modules that Ray does not have: those that the announcement of its JIT checkpointing imports.

A finder at the end of `sys.meta_path` that is asked only for modules no other finder has found: if Ray ever
ships one, Ray's is used. `lastcall-auto.pth` installs it without any variable, since such a script asks for
protection in its code. This module is only imported when a program imports such a name.

Standard library only, and of that only what the interpreter has already loaded: see `bootstrap`.
"""

import sys

TYPE_CHECKING = False  # typing would cost more than all the rest
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# The requested module -> "module:function" of ours, which fills it.
ALIASES = {"ray.train._internal.jit_checkpoint_config": "lastcall.adapters.ray.driver.config:publish"}


class AliasLoader:
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
    return kind(name, AliasLoader(), origin="lastcall")  # type: ignore[arg-type]
