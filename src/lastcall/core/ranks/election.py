"""What the ranks do together, decided from the position that each has reported: pure functions, each answer
with its reason.

The deciding rank calls one of these, claims the answer in the store, and obeys what the register then holds
(core/ranks/agreement.py). So two ranks that see different positions may well come to different answers here:
only one of them counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal, get_args

from lastcall import messages

Kind = Literal[
    "boundary",  # all train on to the boundary of `step` and save there
    "instant",  # all complete `entered` optimizer steps, stop at the gate, and save from the side thread
    "survivors",  # the writers save what they hold now; the missing are dead, frozen or torn
    "nothing",  # no boundary can be agreed on: the instant agreement comes next
    "finish",  # training is finished on all ranks: there is nothing to interrupt
    "abort",  # no consistent state is left: the last committed checkpoint stays the newest
    "alone",  # the store is lost: this rank knows nothing about the others. Never in a register
]
Holdings = Mapping[int, Iterable[tuple[int, ...]]]
"""Which ranks hold the same piece of the shared state, as they registered it at the start: {rank: [holders of
a piece, ...]}. It is enough if the lowest holder of a piece registers it."""


@dataclass(frozen=True)
class Position:
    """How far a rank is. It publishes this while it holds its training back, so that it stays true until the
    decision."""

    rank: int
    step: int  # completed steps
    parked: bool = False  # waits at the boundary of `step`; otherwise the step after it has begun
    finished: bool = False  # training has reached its end here
    entered: int = 0  # optimizer steps completed
    clean: bool = True  # no optimizer step was cut short
    exact: bool = True
    because: str = ""  # when not clean or not exact: why
    barred: bool = False  # not clean, but no step was cut short either: it cannot be saved from the side
    stopped: bool = False  # its training has failed: it has its state, but cannot take another step
    kept: bool = False  # an exact checkpoint of `step` is committed, and nothing has changed since
    keeping: bool = False  # ... or is being written, without a notice: it needs the parts of all ranks
    epochs: int = 0  # completed ones, which `step` counts, too

    def to_bytes(self) -> bytes:
        defaults = {item.name: item.default for item in fields(self)}
        return messages.packed(
            {name: value for name, value in asdict(self).items() if value != defaults[name]}
        )

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Position | None:
        """None for an invalid position: that rank counts as one that did not answer."""
        body = messages.unpacked(data)
        try:
            position = cls(**body)
        except TypeError:
            return None
        return position if messages.typed(position) else None


@dataclass(frozen=True)
class Decision:
    """What all ranks obey. `step` is what is saved, by the `writers`; `entered` says it in optimizer steps,
    where no boundary does."""

    kind: Kind
    step: int = 0
    entered: int = 0
    writers: tuple[int, ...] = field(default=(), repr=False)
    missing: tuple[int, ...] = ()
    because: str = ""
    token: str = ""  # tells this decision from every other; given when it is claimed
    # a checkpoint of it is committed, or begun by all: if that one is committed, it is not written again
    kept: bool = False
    epochs: int = 0  # that `step` counts
    # no rank has come to that boundary yet: it may be the end of an epoch, which is no step
    ahead: bool = False

    def to_bytes(self) -> bytes:
        return messages.packed(
            {**asdict(self), "writers": messages.spans(self.writers), "missing": messages.spans(self.missing)}
        )

    @property
    def shown(self) -> int:
        """The step as users count it: the same on all ranks, whether or not they have come to the end of the
        epoch. Of a boundary that is still ahead, the step before it."""
        return self.step - self.epochs - self.ahead

    def described(self) -> str:
        if self.ahead:
            return f"all save at the boundary after step {self.shown}"
        what = {"boundary": "all save", "instant": "all save at once", "survivors": "the survivors save"}.get(
            self.kind
        )
        return self.kind if what is None else f"{what} step {self.shown}"

    @classmethod
    def from_bytes(cls, data: bytes) -> Decision:
        """All ranks read the same bytes: an unreadable decision is an abort for all."""
        try:
            body = messages.unpacked(data)
            decision = cls(
                **{
                    **body,
                    "writers": messages.ranks(body["writers"]),
                    "missing": messages.ranks(body["missing"]),
                }
            )
            if (
                decision.kind not in get_args(Kind)
                or decision.kind == "alone"
                or not messages.typed(decision)
            ):
                raise ValueError(f"kind {decision.kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            because = (
                f"the decision cannot be read ({type(error).__name__}: {error}): do all ranks run the same "
                "lastcall?"
            )
            return cls("abort", because=because)
        return decision


def boundary(positions: Mapping[int, Position], size: int, holdings: Holdings | None = None) -> Decision:
    """The first boundary that no rank has passed yet. Needs every rank: one that is missing would not stop
    there."""
    missing = _others(positions, size)
    unable = [at.rank for at in positions.values() if not at.clean or (at.stopped and not at.finished)]
    running = [at for at in positions.values() if not at.finished]
    if missing:
        return _nothing(positions, missing, f"{messages.named(missing)} did not say where {_it(missing)}")
    if unable:
        why = positions[unable[0]].because or "its training has failed"
        return _nothing(positions, (), f"{messages.named(unable)} cannot continue: {why}")
    if not running:
        return _finish(positions)
    step = max(at.step if at.parked else at.step + 1 for at in running)
    writers, left_out = _with_the_finished(running, positions, lambda at: at.step == step, holdings or {})
    ready = [at for at in running if at.parked and at.step == step]
    how = (
        "all wait there"
        if len(ready) == len(running)
        else f"{len(running) - len(ready)} of {len(running)} ranks are on their way"
    )
    epochs = _epochs(running)
    ahead = not any(at.step == step for at in running)
    because = (
        ("no rank is past it" if ahead else f"no rank is past step {step - epochs}")
        + f", {how}"
        + _apart(left_out)
    )
    entered = max(at.entered for at in running)
    return Decision("boundary", step, entered, writers, left_out, because, epochs=epochs, ahead=ahead)


def instant(positions: Mapping[int, Position], size: int, holdings: Holdings) -> Decision:
    """What the ranks save from the side, or have saved already."""
    decision = _instant(positions, size, holdings)
    if decision.kind not in ("instant", "survivors") or not _is_kept(decision, positions, size):
        return decision
    return replace(decision, kept=True, because=f"{decision.because}; a checkpoint of it was begun before")


def _instant(positions: Mapping[int, Position], size: int, holdings: Holdings) -> Decision:
    """The last optimizer step that any rank has completed; the ranks behind finish it. Their collectives need
    no rank that is ahead (one that completed a step has sent its part of it), but they do need each other:
    with a rank lost, only survivors() is left."""
    if len(positions) < size or not all(at.clean for at in positions.values()):
        return survivors(positions, size, holdings)
    running = [at for at in positions.values() if not at.finished]
    if not running:
        return _finish(positions)
    level = _levels(positions)
    target = max(level[at.rank] for at in running)
    behind = tuple(sorted(at.rank for at in running if level[at.rank] < target))
    if any(positions[rank].stopped for rank in behind):
        return survivors(positions, size, holdings)
    there = [at for at in running if level[at.rank] == target]
    if not behind and any(not at.exact for at in there) and any(at.exact for at in there):
        # the missing state of ranks inside a step is in their mailboxes
        return survivors(positions, size, holdings)
    writers, left_out = _with_the_finished(running, positions, lambda at: level[at.rank] == target, holdings)
    step, entered = max(at.step for at in there), max(at.entered for at in there)
    how = (
        f"{messages.named(behind)} {'is' if len(behind) == 1 else 'are'} finishing it"
        if behind
        else "all ranks have"
    )
    because = f"no rank has completed more than {target} optimizer steps, {how}" + _apart(left_out)
    return Decision("instant", step, entered, writers, left_out, because, epochs=_epochs(there))


def survivors(positions: Mapping[int, Position], size: int, holdings: Holdings) -> Decision:
    """The newest state of which every shared piece is held by a clean rank, saved by the clean ranks that are
    exactly there."""
    if len(positions) == size and all(at.finished and at.clean for at in positions.values()):
        return _finish(positions)
    clean = {rank: at for rank, at in positions.items() if at.clean}
    if not clean:
        return Decision(
            "abort", missing=tuple(range(size)), because=f"no rank holds a whole state: {_torn(positions)}"
        )
    level = _levels(positions)
    pieces = {holders for rank in sorted(holdings) for holders in holdings[rank]}
    reasons = []
    for target in sorted({level[rank] for rank in clean}, reverse=True):
        there = [at for rank, at in sorted(clean.items()) if level[rank] == target]
        exact = [at for at in there if at.exact]
        if exact and not _uncovered(pieces, exact):
            there = exact
        writers = tuple(at.rank for at in there)
        lost = _uncovered(pieces, there)
        step, entered = max(at.step for at in there), max(at.entered for at in there)
        if not lost:
            missing = _others(writers, size)
            epochs = _epochs(there)
            because = (
                f"{messages.named(writers)} hold{'s' if len(writers) == 1 else ''} all of step "
                f"{step - epochs}"
            )
            return Decision(
                "survivors",
                step,
                entered,
                writers,
                missing,
                because + _why_missing(missing, positions),
                epochs=epochs,
            )
        reasons.append(_lost(min(lost), clean, step))
    because = (
        reasons[0] + "; plain FSDP and other sharding without a replica cannot be saved by survivors alone"
    )
    return Decision("abort", missing=_others((), size), because=because)


def _epochs(positions: Sequence[Position]) -> int:
    """The steps that the furthest rank has completed."""
    return max(positions, key=lambda at: at.step).epochs


def _is_kept(decision: Decision, positions: Mapping[int, Position], size: int) -> bool:
    """One rank that knows of the commit is enough. A save that is being written can be committed only if no
    rank is missing from it."""
    level = _levels(positions)
    target = max(level[rank] for rank in decision.writers)
    there = [at for at in positions.values() if at.step == decision.step and level[at.rank] == target]
    return any(at.kept for at in there) or (len(there) == size and all(at.keeping for at in there))


def _uncovered(pieces: Iterable[tuple[int, ...]], there: Iterable[Position]) -> list[tuple[int, ...]]:
    ranks = {at.rank for at in there}
    return [holders for holders in pieces if ranks.isdisjoint(holders)]


# ---- parts of the decisions --------------------------------------------------------------------------------


def _levels(positions: Mapping[int, Position]) -> dict[int, int]:
    """The number that distinguishes two states of the parameters. A run without optimizer hooks has its steps
    alone."""
    hooked = any(at.entered for at in positions.values())
    return {rank: at.entered if hooked else at.step for rank, at in positions.items()}


def _finish(positions: Mapping[int, Position]) -> Decision:
    ranks = tuple(sorted(positions))
    step, entered = max(at.step for at in positions.values()), max(at.entered for at in positions.values())
    return Decision("finish", step, entered, ranks, (), "training is finished on all ranks")


def _nothing(positions: Mapping[int, Position], missing: tuple[int, ...], because: str) -> Decision:
    step = max((at.step for at in positions.values()), default=0)
    entered = max((at.entered for at in positions.values()), default=0)
    return Decision("nothing", step, entered, (), missing, because)


def _with_the_finished(
    running: Sequence[Position],
    positions: Mapping[int, Position],
    there: Callable[[Position], bool],
    holdings: Holdings,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The writers, and the finished ranks that are none: at another step they may not write a piece that
    others hold, too, or the checkpoint would be torn. They may write what is theirs alone: it is their final
    state."""
    sharing = {
        rank for pieces in holdings.values() for holders in pieces if len(holders) > 1 for rank in holders
    }
    finished = [at for at in positions.values() if at.finished]
    joining = [at.rank for at in finished if there(at) or at.rank not in sharing]
    left_out = tuple(sorted(at.rank for at in finished if at.rank not in set(joining)))
    return tuple(sorted([*(at.rank for at in running), *joining])), left_out


def _lost(holders: tuple[int, ...], clean: Mapping[int, Position], step: int) -> str:
    """Why no rank at this step holds that piece."""
    elsewhere = [rank for rank in holders if rank in clean]
    if elsewhere:
        at = clean[elsewhere[0]].step
        who = f"{messages.named(elsewhere)} still hold{'s' if len(elsewhere) == 1 else ''}"
        return f"at step {step} a shard is missing that only {who}, at step {at}: no step is held in full"
    if len(holders) == 1:
        return f"rank {holders[0]} held the only copy of its shard"
    return f"{messages.named(holders)} held the only copies of a shard, and all of them are lost"


def _torn(positions: Mapping[int, Position]) -> str:
    if not positions:
        return "no rank has reported its position"
    first = positions[min(positions)]
    how = "cannot be saved from the side" if first.barred else "failed inside an optimizer step"
    return f"{messages.named(positions)} {how} ({first.because or 'no reason given'})"


def _why_missing(missing: Iterable[int], positions: Mapping[int, Position]) -> str:
    silent = [rank for rank in missing if rank not in positions]
    torn = [rank for rank in missing if rank in positions and not positions[rank].clean]
    behind = [rank for rank in missing if rank in positions and positions[rank].clean]
    parts = [
        f"{messages.named(silent)} did not answer" if silent else "",
        f"{messages.named(torn)} failed inside an optimizer step" if torn else "",
        f"{messages.named(behind)} {'is' if len(behind) == 1 else 'are'} at an older one" if behind else "",
    ]
    return "".join(f"; {part}" for part in parts if part)


def _apart(left_out: Sequence[int]) -> str:
    return (
        f"; {messages.named(left_out)} finished at another step and saves nothing that others hold"
        if left_out
        else ""
    )


def _others(known: Iterable[int], size: int) -> tuple[int, ...]:
    known = set(known)
    return tuple(rank for rank in range(size) if rank not in known)


def _it(ranks: Sequence[int]) -> str:
    return "it is" if len(ranks) == 1 else "they are"
