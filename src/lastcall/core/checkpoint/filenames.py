"""What the files of a checkpoint are called. One process: state.json, model.safetensors. Many ranks:
state-00003.json, model-00003.safetensors, and one manifest.json that says which piece of which tensor lies
where."""

from __future__ import annotations

import re

from lastcall.formats import manifest

DOCUMENT = "state.json"
_RANKED = re.compile(r".*-(\d{5,})\.(?:json|safetensors)")


def document(rank: int | None = None) -> str:
    """`rank`: None in a checkpoint of one process."""
    return DOCUMENT if rank is None else f"state-{rank:05d}.json"


def tensors(group: str, rank: int | None = None) -> str:
    return f"{group}.safetensors" if rank is None else manifest.file_name(group, rank)


def part(rank: int) -> str:
    """A rank's receipt, while the checkpoint is under construction."""
    return f"part-{rank:05d}.json"


def rank_of(file: str) -> int:
    """The rank that wrote a file; 0 where the name does not say."""
    found = _RANKED.fullmatch(file)
    return int(found[1]) if found else 0


def group_of(file: str, rank: int | None = None) -> str | None:
    """The group of a file of tensors, if it is one that this rank wrote."""
    end = tensors("", rank)
    return file.removesuffix(end) if file.endswith(end) else None
