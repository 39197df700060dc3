"""A loader's class with a few methods of ours in it, which cannot be told from the class itself."""

from __future__ import annotations

import copyreg
from typing import Any


def derive(own: type[Any], bases: tuple[type[Any], ...], members: dict[str, Any]) -> type[Any]:
    """A subclass that carries the name of `own`. Copies and pickles of its instances are plain instances of
    `own`."""

    def reduce_as_own(self: Any, protocol: Any) -> Any:
        reduced = super(derived, self).__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__ and arguments == (derived,):  # type: ignore[attr-defined]
            # pickle insists on the object's real class in __newobj__, and only there
            return (copyreg._reconstructor, (own, object, None), *rest)  # type: ignore[attr-defined]
        return (make, tuple(own if argument is derived else argument for argument in arguments), *rest)

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    derived: type[Any] = type(own.__name__, bases, {**named, "__reduce_ex__": reduce_as_own, **members})
    return derived
