"""What run.batches() returns: an iterator that knows how many batches a whole pass has."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any


class Batches(Iterator[Any]):
    """`for` and everything that calls iter() gets the generator itself, without a call in between."""

    def __init__(self, source: Any, batches: Generator[Any, None, None]) -> None:
        self._source = source
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        """Of the whole pass, also where a resumed epoch has fewer left."""
        return len(self._source)

    def close(self) -> None:
        self._batches.close()
