"""nn.Module: parameters and buffers under their state_dict names, read and written in place.

For the usual module, `state_dict()` (13 ms for 5,000 tensors) is not called at all: the same names are found
by walking the modules once, and later only looked at again to see whether they still hold. A module that
changes what its state is (a state_dict of its own, hooks) is asked through state_dict() each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lastcall import errors
from lastcall.adapters.torch.distributed import placement
from lastcall.adapters.torch.recorded_save.boundary_buffers import CopiedBuffer
from lastcall.adapters.torch.state import copies, fitting, parts, structure
from lastcall.adapters.torch.state.encoding import Stale
from lastcall.adapters.torch.state.parts import Encoding, Restoration
from lastcall.adapters.torch.tensors import tensors
from lastcall.adapters.torch.tensors.table import place_of
from lastcall.formats import tree

COPY_LIMIT = 16 << 20  # of the buffers of a module, at most so much is copied at a boundary


class Copy:
    """What is copied of a module at a boundary: tensors by state_dict name, and values that are not
    tensors."""

    __slots__ = ("lease", "names", "others")

    def __init__(self, names: list[str], lease: copies.Lease | None, others: dict[str, Any]) -> None:
        self.names = names
        self.lease = lease
        self.others = others

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.lease.tensors, strict=True)) if self.lease is not None else {}


class ModulePart:
    """Looks after one module."""

    tag = "module"
    rank = 0

    def __init__(self, module: torch.nn.Module) -> None:
        self.value = module
        self.module = structure.unwrapped(module)
        self.structure = structure.Structure(self.module)
        self._buffers = copies.Buffers()

    def refresh(self) -> structure.Structure:
        """The structure as it is now."""
        if not self.structure.holds():
            self.structure = structure.Structure(self.module)
        return self.structure

    def copy(self) -> Copy:
        found = self.structure
        if not found.plain:
            return self._copy_state_dict()
        names, live = [], []
        for name, buffer, copied in self._budgeted(found):
            if copied:
                names.append(name)
                live.append(buffer)
        lease = self._buffers.copy(live) if live else None
        others = (
            {name: tree.copy(owner.get_extra_state()) for name, owner in found.extras} if found.extras else {}
        )
        return Copy(names, lease, others)

    def parameters(self) -> list[torch.Tensor]:
        return list(self.refresh().parameters().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its parameters. Those that have no shape yet are refused elsewhere."""
        found = self.refresh().parameters().items()
        return {
            name: tuple(parameter.shape)
            for name, parameter in found
            if not torch.nn.parameter.is_lazy(parameter)
        }

    def live_buffers(self) -> list[torch.Tensor]:
        """Those that are too large to be copied at a boundary."""
        return (
            [buffer for _, buffer, copied in self._budgeted(self.structure) if not copied]
            if self.structure.plain
            else []
        )

    def _budgeted(self, found: structure.Structure) -> Iterator[tuple[str, torch.Tensor, bool]]:
        room = COPY_LIMIT
        for name, owner, key in found.buffers:
            buffer = owner.get(key)
            if buffer is not None:
                copied = buffer.nbytes <= room
                room -= buffer.nbytes if copied else 0
                yield name, buffer, copied

    def _copy_state_dict(self) -> Copy:
        """State that a module makes up itself is copied where it is small; parameters stay live, as
        elsewhere."""
        own = {tensors.address(parameter) for parameter in self.structure.parameters().values()}
        names, live, others = [], [], {}
        for name, value in self.module.state_dict().items():
            if not isinstance(value, torch.Tensor):
                others[name] = tree.copy(value)
            elif value.nbytes < copies.LARGE and tensors.address(value) not in own:
                names.append(name)
                live.append(value)
        return Copy(names, copies.Lease([copies.tensor(value) for value in live], []), others)

    def encode(self, encoder: Encoding, path: str, copied: object) -> dict[str, object]:
        mine = copied if isinstance(copied, Copy) else None
        fragment = encoder.cached.get(id(self.value))
        if fragment is None:
            fragment, others = self._fragment(encoder, path, mine)
        else:
            others = mine.others if mine is not None else self.structure.extra_states()
            if mine is not None:
                _exchange(encoder, fragment, mine)
        pairs = [
            [name, encoder.value(value, f"{path}.state_dict()[{name!r}]")] for name, value in others.items()
        ]
        return {
            tree.TAG: self.tag,
            "class": placement.class_of(self.module).__qualname__,
            "tensors": fragment,
            "others": pairs,
            "versions": self.structure.versions,
        }

    def fragment(self, encoder: Encoding, path: str) -> list[list[object]] | None:
        """What may be cached: the references of all tensors, or None for a module that must be asked each
        time."""
        return self._fragment(encoder, path, None)[0] if self.refresh().plain else None

    def _fragment(
        self, encoder: Encoding, path: str, mine: Copy | None
    ) -> tuple[list[list[object]], dict[str, Any]]:
        found = self.refresh()
        copied = mine.tensors() if mine is not None else {}
        group, prefix = place_of(path, whole="")
        prefix = f"{prefix}." if prefix else ""
        _refuse_first_fsdp(self.module, path)
        live, others = found.state()

        for name, tensor in live.items():
            tensors.check(tensor, f"{path}.state_dict()[{name!r}]")
        pairs: list[list[object]] = []
        frozen = found.frozen(live, encoder.owned)
        same = found.replicated(live, encoder.replicas)
        for name, tensor in live.items():
            place = (f"{group}.frozen" if name in frozen else group, prefix + name)
            pairs.append([name, encoder.put(copied.get(name, tensor), place, mine, same.get(name))])
        return pairs, others if mine is None else mine.others

    def match(self, restorer: Restoration, document: dict[str, object], path: str) -> None:
        fitting.match_module(self.module, self.refresh(), restorer, document, path)


def copied_buffers(small: object) -> Iterator[CopiedBuffer]:
    """Of the modules in a boundary copy: what was copied, and the live ones."""
    if isinstance(small, parts.Held):
        if isinstance(small.part, ModulePart) and isinstance(small.copied, Copy):
            live, _ = small.part.refresh().state()
            for name, copy in small.copied.tensors().items():
                if name in live:
                    yield CopiedBuffer(live[name], copy, small.copied)
    elif isinstance(small, dict | list | tuple):
        for item in small.values() if isinstance(small, dict) else small:
            yield from copied_buffers(item)


def _refuse_first_fsdp(module: torch.nn.Module, path: str) -> None:
    """state_dict() of FSDP1 is a collective: from a side thread, or on the ranks that are left, it would
    never return."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise errors.StateError(
            f"{path}: a module under FullyShardedDataParallel (FSDP1) cannot be saved at any moment. Shard "
            "it with "
            "torch.distributed.fsdp.fully_shard(module) instead."
        )


def _exchange(encoder: Encoding, fragment: list[list[Any]], mine: Copy) -> None:
    """Read the copied buffers from their copies."""
    if mine.lease is None:
        return
    refs = {name: ref for name, ref in fragment if name in set(mine.names)} if mine.names else {}
    for name, copy in mine.tensors().items():
        ref = refs.get(name)
        if ref is None or list(copy.shape) != ref["shape"] or str(copy.dtype) != f"torch.{ref['dtype']}":
            raise Stale(name)
        dense = tensors.dense(placement.local(copy))
        if not placement.is_dtensor(copy) and list(dense.shape) != ref.get("dense", ref["shape"]):
            raise Stale(name)
        encoder.replace((ref["g"], ref["n"]), tensors.source(dense, mine))
