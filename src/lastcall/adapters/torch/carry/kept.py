"""run.carry(): values that a script keeps on purpose, saved with every checkpoint and there again in the next
incarnation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lastcall import errors
from lastcall.adapters.torch.carry import values


class Kept:
    """Its attributes (or items) are saved: `state = run.carry(best=math.inf); state.best = 0.3`."""

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_loaded", {})

    def _begin(self, initial: Mapping[str, Any]) -> None:
        """Give names their first values: those of the checkpoint where it has them. A name that is there
        keeps its value."""
        for name, value in initial.items():
            if name in self._values:
                continue
            value = self._loaded.pop(name, value)
            _check(name, value)
            self._values[name] = value

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._loaded.update(saved)

    def _read(self) -> dict[str, Any]:
        """What the checkpoint had and the script has not asked for yet stays with it."""
        return {**self._loaded, **self._values}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"run.carry() was not given {name!r}: name it with its first value, run.carry({name}=...)"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_") or not name.isidentifier():
            raise AttributeError(f"{name!r} cannot be carried: give it a name that begins with a letter")
        self._values[name] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return f"run.carry({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def _check(name: str, value: Any) -> None:
    try:
        values.savable(value, lambda _: False)
    except values.Unsavable as why:
        raise errors.StateError(
            f"run.carry({name}=...) cannot be saved: {why}. Carry numbers, text, tensors, and lists and "
            "dicts of them; hand everything "
            "else to protect()."
        ) from None
