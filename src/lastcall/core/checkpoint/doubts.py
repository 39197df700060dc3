"""Why checkpoints of this run cannot be called exact, though its state was captured whole: what lastcall
found that it does not save.

A doubt is found during training (a variable that was not handed over, a position that cannot be followed),
logged as a warning once, and part of every checkpoint from then on: `exact: false`, with the same reason. It
is restored with the checkpoint, since a run that once diverged stays different.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger("lastcall")
_TOLD = 3  # reasons that a record lists in full


class Doubts:
    def __init__(self) -> None:
        self._reasons: dict[str, None] = {}  # in the order in which they were found

    def add(self, reason: str, remedy: str) -> None:
        """`reason`: what is not saved or not known, naming it, as part of a sentence ("the scheduler of
        `optimizer` was not handed over"). `remedy`: what to type, a sentence. Logged the first time only."""
        if reason not in self._reasons:
            self._reasons[reason] = None
            log.warning("A resumed run will differ: %s. %s", reason, remedy)

    def __bool__(self) -> bool:
        return bool(self._reasons)

    @property
    def because(self) -> str:
        """For the record; "" where there is no doubt."""
        told = list(self._reasons)
        more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
        return "; ".join(told[:_TOLD]) + more

    def document(self) -> list[str]:
        return list(self._reasons)

    def resume(self, reasons: Iterable[object]) -> None:
        """Those of the checkpoint that the run continues from: known, and not logged again."""
        self._reasons.update(dict.fromkeys(reason for reason in reasons if isinstance(reason, str)))
