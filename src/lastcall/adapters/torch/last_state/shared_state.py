"""What a training process keeps for the other ranks, and what it knows of them: which parameters they share,
the mail that speaks for it if it is killed, and the buckets of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lastcall.adapters.torch.distributed import ddp_buckets, placement
from lastcall.adapters.torch.last_state import reconstruct, recorder
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.core.engine import digest
from lastcall.core.guard import mailbox
from lastcall.types import Capture

_ENDS = 1024  # numbers


class Together:
    """A world of one until among() says otherwise."""

    def __init__(self) -> None:
        self._state = StateSet({})
        self.rank, self.size = 0, 1
        # ranks of the run that saved what was restored, and of this one
        self.worlds: tuple[int, int] | None = None
        self._replicas = placement.Replicas()
        self._mail: recorder.Mail | None = None
        # where the mail of all ranks is: folder, run, incarnation
        self._post: tuple[Path, str, int] | None = None
        self._layouts = ddp_buckets.Layouts()
        self._saved_buckets: Any = None  # of the checkpoint that was restored, until they are put back

    def hold(self, state: StateSet) -> None:
        self._state = state

    def among(self, rank: int, size: int) -> None:
        """This process is one of many. Known from the start: the position of the data depends on it."""
        self.rank, self.size = rank, size

    def join(
        self, run: str, incarnation: int, folder: Path, writer: Callable[[mailbox.Mailbox], recorder.Mail]
    ) -> None:
        """The ranks have begun: open the mailbox."""
        self._find_replicas()
        self._post = (folder, run, incarnation)
        mailbox.sweep(folder, run, incarnation)
        box = mailbox.Mailbox.create(folder, run, incarnation, self.rank)
        if box is not None:
            self._mail = writer(box)
            self._mail.install()

    def leave(self) -> None:
        if self._mail is not None:
            self._mail.remove()
            self._mail.box.close()
            self._mail = None

    # ---- the mail ------------------------------------------------------------------------------------------

    def post(self, copy: recorder.Copied) -> float:
        """Mail a boundary copy. Returns the seconds that other mail has taken since the last one."""
        if self._mail is None:
            return 0.0
        self._mail.boundary(copy)
        cost, self._mail.cost = self._mail.cost, 0.0
        return cost

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        if self._post is None:
            return None
        letters = mailbox.read(*self._post, rank)
        own = self._mail.box.records() if self._mail is not None else []
        made = reconstruct.compose(mine.document, mine.groups, letters, step, own)
        return Capture(step, made.document, made.groups, made.exact, made.because)

    # ---- what is shared ------------------------------------------------------------------------------------

    def holdings(self) -> tuple[tuple[int, ...], ...]:
        self._find_replicas()  # the wrapper may have been made after protect()
        return self._state.holdings()

    def alone(self) -> str:
        """A digest of what only this rank holds and no mail carries: parameters that nothing says are
        others', too. Taken at the same boundary by all ranks, it tells whether they are: ranks that average
        their gradients by hand hold the same."""
        own = [tensor for tensor in self._state.tensors() if self._is_own(tensor)]
        return digest.of(b"".join(_ends(tensor) for tensor in own)) if own else ""

    def _is_own(self, tensor: torch.Tensor) -> bool:
        mine = (
            isinstance(tensor, torch.nn.Parameter) and not placement.is_dtensor(tensor) and tensor.numel() > 0
        )
        return mine and self._replicas.of(tensor) is None

    def _find_replicas(self) -> None:
        found = self._replicas = placement.replicas()
        self._state.replicated(found)
        wrappers = ddp_buckets.sorted_by(found.wrappers, self._state.tensors())
        if wrappers != self._layouts.wrappers:
            self._layouts = ddp_buckets.Layouts(wrappers)

    # ---- buckets -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """At a boundary, on the training thread: torch tells of buckets only under a lock that a backward may
        hold."""
        if not self._layouts.settled:
            self._layouts.look()

    def buckets(self) -> Any:
        """For the run's document; nothing where there are none."""
        return self._layouts.document() or self._saved_buckets

    def resumed_buckets(self, saved: Any) -> None:
        self._saved_buckets = saved

    def settle_buckets(self) -> None:
        """Give the wrappers of DistributedDataParallel the buckets that they had. All ranks call it where
        their run begins, or none."""
        if self._saved_buckets is not None and self.size > 1 and self.worlds == (self.size, self.size):
            self._layouts.put_back(self._saved_buckets)
        self._saved_buckets = None


def _ends(tensor: torch.Tensor) -> bytes:
    """Some of the beginning, the middle and the end of a tensor."""
    flat = tensor.detach().reshape(-1)
    places = (0, flat.numel() // 2, max(0, flat.numel() - _ENDS))
    return b"".join(
        flat[place : place + _ENDS].contiguous().cpu().view(torch.uint8).numpy().tobytes() for place in places
    )
