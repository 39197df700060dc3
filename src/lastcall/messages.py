"""Messages between ranks through the store: small JSON objects, validated, since another rank may run another
version of lastcall."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

_PLAIN = {"int": int, "bool": bool, "str": str}
_NAMED = 8  # ranks named in a sentence


def packed(body: Mapping[Any, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def unpacked(data: bytes | None) -> dict[str, Any]:
    """Empty if it is not a JSON object."""
    try:
        body = json.loads(data or b"")
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def typed(value: Any) -> bool:
    """Whether the plain fields of a dataclass have the declared types."""
    return all(
        type(getattr(value, item.name)) is _PLAIN[str(item.type)]
        for item in fields(value)
        if item.type in _PLAIN
    )


def spans(ranks: Iterable[int]) -> list[list[int]]:
    """[0, 1, 2, 5] as [[0, 2], [5, 5]]: what every rank reads must not grow with the number of ranks."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def ranks(spans: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(rank for first, last in spans for rank in range(first, last + 1))


def named(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 2", "ranks 0, 1, 2, 3, 4, 5, 6, ... and 16383 (16384 in all)"."""
    found = sorted(ranks)
    if len(found) < 2:
        return f"rank {found[0]}" if found else "no rank"
    if len(found) > _NAMED:
        return f"ranks {', '.join(map(str, found[: _NAMED - 1]))}, ... and {found[-1]} ({len(found)} in all)"
    return f"ranks {', '.join(map(str, found[:-1]))} and {found[-1]}"
