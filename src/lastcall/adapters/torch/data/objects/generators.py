"""Random generators as plain values: what a loader's order and its workers' augmentation are drawn from.

A state is made of tuples, bytes, ints and strings only, so that it is immutable, cheap to compare, safe to
share between copies, and can be written without pickle.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

Parts = tuple[Any, Any, Any]  # torch, python, numpy; None where nothing is known
State = tuple[Any, Any, Any, tuple[Any, ...]]  # ... and the loader's own generators

# loader.batch_sampler.sampler.sampler: wrappers around wrappers do occur (distributed weighted samplers)
_SAMPLER_DEPTH = 4


def take_parts() -> Parts:
    """The process-wide generators of torch (CPU), python and numpy."""
    return (
        _bytes(torch.default_generator.get_state()),
        _take_python(random),
        _freeze(np.random.get_state(legacy=False)),
    )


def put_parts(parts: Parts) -> None:
    """The reverse of take_parts; a part that is None is left as it is."""
    torch_part, python_part, numpy_part = parts
    if torch_part is not None:
        _put_torch(torch.default_generator, torch_part)
    if python_part is not None:
        _put_python(random, python_part)
    if numpy_part is not None:
        np.random.set_state(_thaw(numpy_part))


def take(generators: Iterable[Any]) -> State:
    return (*take_parts(), take_generators(generators))


def put(state: State, generators: Iterable[Any]) -> None:
    put_parts((state[0], state[1], state[2]))
    put_generators(state[3], generators)


def take_generators(generators: Iterable[Any]) -> tuple[Any, ...]:
    return told_generators(hold_generators(generators))


def hold_generators(generators: Iterable[Any]) -> tuple[Any, ...]:
    """What take_generators() gives, once it is called: for every batch, most of which are never used."""
    return tuple(
        generator.get_state() if isinstance(generator, torch.Generator) else _take_own(generator)
        for generator in generators
    )


def told_generators(held: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_bytes(one) if isinstance(one, torch.Tensor) else one for one in held)


def put_generators(states: Iterable[Any], generators: Iterable[Any]) -> None:
    for state, generator in zip(states, generators, strict=False):
        _put_own(generator, state)


def made(kind: str, state: Any) -> Any:
    """A new generator of the kind that this state was taken of; None where none can be made."""
    if kind == "Random":
        return random.Random()
    if kind == "RandomState":
        return np.random.RandomState()
    if kind != "Generator":
        return None
    if isinstance(state, bytes):
        # otherwise of a device
        return torch.Generator() if len(state) == torch.default_generator.get_state().numel() else None
    bits = getattr(np.random, str(_thaw(state)["bit_generator"]), None)
    return None if bits is None else np.random.Generator(bits())


def find_generators(loader: Any) -> list[Any]:
    """The generators that belong to this loader and its samplers, each once, in an order that does not change
    between incarnations.

    torch's default generator is left out wherever it was passed explicitly: it belongs to the process, not to
    the loader.
    """
    found: list[Any] = []
    for candidate in _candidates(loader):
        own = isinstance(
            candidate, torch.Generator | random.Random | np.random.Generator | np.random.RandomState
        )
        if (
            own
            and candidate is not torch.default_generator
            and all(candidate is not known for known in found)
        ):
            found.append(candidate)
    return found


def samplers(loader: Any) -> list[Any]:
    """The samplers that this loader draws from, outermost first, each once."""
    found: list[Any] = []
    waiting = [(getattr(loader, "batch_sampler", None), 0), (getattr(loader, "sampler", None), 0)]
    while waiting:
        sampler, depth = waiting.pop(0)
        if sampler is None or depth > _SAMPLER_DEPTH or any(sampler is known for known in found):
            continue
        found.append(sampler)
        waiting.append((getattr(sampler, "sampler", None), depth + 1))
        waiting.append((getattr(sampler, "batch_sampler", None), depth + 1))  # Accelerate's BatchSamplerShard
    return found


def _candidates(loader: Any) -> Iterator[Any]:
    yield getattr(loader, "generator", None)
    for sampler in samplers(loader):
        yield getattr(sampler, "generator", None)
        attributes = getattr(sampler, "__dict__", {})
        for name in sorted(attributes):
            yield attributes[name]


def _take_own(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return _take_python(generator)
    if isinstance(generator, np.random.Generator):
        return _freeze(generator.bit_generator.state)
    return _freeze(generator.get_state(legacy=False))


def _put_own(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        _put_torch(generator, state)
    elif isinstance(generator, random.Random):
        _put_python(generator, state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _thaw(state)
    else:
        generator.set_state(_thaw(state))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _put_torch(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _take_python(source: Any) -> tuple[int, bytes, str | None]:
    version, words, gauss = source.getstate()
    return (version, struct.pack(f"<{len(words)}I", *words), None if gauss is None else float(gauss).hex())


def _put_python(target: Any, state: Any) -> None:
    version, words, gauss = state
    numbers = struct.unpack(f"<{len(words) // 4}I", words)
    target.setstate((version, numbers, None if gauss is None else float.fromhex(gauss)))


def _freeze(value: Any) -> Any:
    """numpy's nested state (dictionaries with arrays) as tuples; any bit generator's, not only the default
    one's."""
    if isinstance(value, dict):
        return ("dict", tuple((key, _freeze(item)) for key, item in value.items()))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return ("float", value.hex())  # bit for bit, whatever carries the text
    return value if isinstance(value, str) else int(value)


def _thaw(value: Any) -> Any:
    if not isinstance(value, tuple | list):
        return value
    if value[0] == "dict":
        return {key: _thaw(item) for key, item in value[1]}
    if value[0] == "array":
        return np.frombuffer(value[2], dtype=value[1]).copy()
    return float.fromhex(value[1])
