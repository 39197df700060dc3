"""What run.batches(), run.steps() and run.epochs() return: iterators that know how long they are."""

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


class Numbers(Iterator[int]):
    """Of the steps or the epochs that are left: `tqdm(run.steps(n))` has a total."""

    def __init__(self, left: int, numbers: Generator[int, None, None]) -> None:
        self._left = left
        self._numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return self._numbers

    def __next__(self) -> int:
        return next(self._numbers)

    def __len__(self) -> int:
        """When it was made. One that is empty is no reason to skip the loop: the end is reached in it."""
        return self._left

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        self._numbers.close()
