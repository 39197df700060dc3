"""Where a loader stands: the passes over it, and what is needed to make the latest one again.

Kept apart from the loader itself: iterators hold the ledger, and a ledger that held the loader would close a
cycle around persistent workers, which then would live until the next garbage collection instead of ending
with the loader.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lastcall import errors
from lastcall.adapters.torch.data import worker_side as workers
from lastcall.adapters.torch.data.delivery import between, lead, seen, sites
from lastcall.adapters.torch.data.delivery.seen import Marks
from lastcall.adapters.torch.data.objects import generators as rng
from lastcall.adapters.torch.data.objects import held, lazy, standing
from lastcall.adapters.torch.data.objects.held import Pairs, Snapshot
from lastcall.core.checkpoint.doubts import Doubts

VERSION = 1
KIND = "loader"

FRESH = "fresh"  # nothing was begun yet
INSIDE = "inside"  # in a pass whose end was not seen
BETWEEN = "between"  # the latest pass came to its end
LEFT = "left"  # the latest pass was left before its end (`break`), and its iterator is gone

_LOOKS = 2  # boundaries at which it is looked for what stands between a loader and the loop

Facts = tuple[int | None, int | None, int, bool]  # batches, batch size, workers, iterable
# of a DistributedSampler: replicas, samples, seed, shuffle, drop_last
Sampler = tuple[int, int, int, bool, bool]
# of a worker process: rng.Parts, and what its objects hold (absent where it was saved before that was known)
Worker = tuple[Any, ...]
# A moment of a loader: what may have changed a batch later. Resume, passes begun, pass; phase, delivered,
# failed, draw, workers of the pass; generators; what moves below the loader, and where it is; draws that
# moved generators. A plain tuple: one is made at every batch, and a class would double what that costs.
Noted = tuple[Any, ...]


class Pool:
    """The workers of one iterator: the generators that seeded them, and their own as of the last delivered
    batches."""

    def __init__(self, created: rng.State, saved: Sequence[Worker | None], persistent: bool) -> None:
        self.created = created
        self.workers = list(saved)
        self.persistent = persistent
        self.asked = False  # the dataset has a state_dict(), which torchdata asks for
        self.made_for: Pass | None = (
            None  # the pass whose iterator started them; no incarnation had them before
        )
        self._ended: set[int] = set()

    def absorb(self, message: object) -> None:
        if isinstance(message, workers.Envelope):
            # An ended worker's last word may overtake its batches, which wait for their turn.
            if message.worker not in self._ended:
                self._merge(message.worker, message.report)
        elif isinstance(message, workers.WorkerStop):
            self._ended.add(message.worker_id)
            self._merge(message.worker_id, message.report)

    def restart(self) -> None:
        """The next pass of persistent workers begins."""
        self._ended.clear()

    def _merge(self, worker: int, report: workers.Report) -> None:
        known = self.workers[worker] or (None, None, None, ())
        parts = tuple(old if new is None else new for new, old in zip(report.parts, known[:3], strict=True))
        held_there = known[3] if len(known) > 3 else ()
        if report.held:
            held_there = tuple({**dict(held_there), **dict(report.held)}.items())
        self.workers[worker] = (*parts, held_there)


@dataclass(eq=False)
class Pass:
    """One iteration over the loader."""

    facts: Facts
    epochs: tuple[int, ...]  # what the samplers' set_epoch() got
    begin: rng.State  # before the index sampler's iterator was made
    draw: rng.State | None = None  # before its first draw; None until then
    delivered: int = 0
    failed: int = 0  # batches that raised: their indices are used up all the same
    phase: str = INSIDE
    pool: Pool | None = None
    workers_at_begin: tuple[Worker | None, ...] = ()
    sampler: Sampler | None = None
    site: str = ""  # where the script opened it
    taken: Resume | None = None  # the loaded position that it continues
    opened: int = 0  # what another incarnation had delivered of it
    ended: int = 0  # the step in which its end was seen
    seconds: float = 0.0  # that its batches took, where they must be made again
    costly: float = 30.0  # of these, where it is said what a resume would cost
    # before the latest draws
    recent: deque[tuple[Noted, rng.Parts | None]] = field(default_factory=lambda: deque(maxlen=lead.UNKNOWN))
    # the randomness for what was drawn and not trained, and is made again
    remade: list[rng.Parts | None] = field(default_factory=list)
    # begun before the loop; an uninterrupted run would have begun it inside: what it draws is drawn for good
    moves: bool = False
    iterator: weakref.ref[Any] | None = None  # that the script holds
    before_end: Noted | None = None  # where it stood before its end was seen
    former: Pass | None = None  # the one before, for what is held across the end of a pass
    held: Snapshot | None = None  # what the objects below the loader held when it began ...
    held_at_draw: Snapshot | None = None  # ... and at its first draw; None where that is the same
    stands: dict[Any, Any] | None = None  # what its samplers held then; None: not looked at yet
    over_again: standing.Undo | None = None  # gives them what the script made, where that is something else
    over: str = ""  # the kind of its dataset
    draws: int = 0  # from the sampler
    taken_out: int = 0  # batches of a stream that workers have made
    # the latest draws
    indices: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=seen.KEPT))
    # of the latest batches of a stream
    glimpses: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=seen.KEPT))
    seen: Marks = ()  # of the pass that is continued
    # draws that moved the process's generators, and what these were before
    moved: dict[int, rng.Parts] = field(default_factory=dict)
    moves_unseen: bool = False  # ... and there were more of them
    anew: bool = False  # somebody makes all of it again: what its draws move stays moved
    again: Pairs = ()  # of a resumed pass: what they held then, where it differs from what they hold now

    def remember(self, number: int, before: rng.Parts) -> bool:
        """Remember what a draw was made with. False where that is one too many."""
        if len(self.moved) >= lazy.MOST:
            return False
        self.moved[number] = before
        return True

    def began_with(self) -> dict[Any, Any]:
        """What its samplers held when it began."""
        if self.stands is None:
            self.stands = standing.of(self.held or {})
        return self.stands

    def restore(self) -> None:
        """The samplers get back what the script gave them."""
        if self.over_again is not None:
            self.over_again()
            self.over_again = None

    @property
    def iterable(self) -> bool:
        return self.facts[3]

    @property
    def inside(self) -> bool:
        return self.phase == INSIDE

    @property
    def here(self) -> int:
        """Delivered in this incarnation."""
        return self.delivered - self.opened


# the pass; the passes begun; whether its iterator is older than who begins it again
Anchor = tuple[Pass, int, bool]


@dataclass(frozen=True)
class Resume:
    """A loaded position that no iterator has taken up yet."""

    state: dict[str, Any]

    @property
    def phase(self) -> str:
        return str(self.state["phase"])

    @property
    def persistent(self) -> bool:
        pool = self.state["pool"]
        return pool is not None and bool(pool[1])

    @property
    def created(self) -> rng.State:
        pool = self.state["pool"]
        found: rng.State = self.state["begin"] if pool is None else pool[0]
        return found

    def workers(self, count: int) -> list[Worker | None]:
        """Each worker's generators; none if the number of workers changed, since no batch would go to the
        same one."""
        pool = self.state["pool"]
        saved = [] if pool is None else list(pool[2])
        return saved if len(saved) == count else [None] * count

    def held_at(self, *names: str) -> Pairs:
        """What the objects below the loader held at the first of these moments that is known."""
        document = self.state.get("held") or {}
        return next((document[name] for name in names if name in document), ())

    def stands(self, facts: Facts, sampler: Sampler | None) -> Pairs:
        """What the samplers held when the pass began, where they are those of a loader like that one."""
        document = self.state.get("held") or {}
        alike = self.state["facts"][1] == facts[1] and self.state.get("sampler") == sampler
        return document.get("stands", ()) if alike else ()

    def to_pass(self, facts: Facts, pool: Pool | None, sampler: Sampler | None) -> Pass:
        state = self.state
        return Pass(
            facts,
            tuple(state["epochs"]),
            state["begin"],
            state["draw"],
            state["delivered"],
            state["failed"],
            pool=pool,
            workers_at_begin=() if pool is None else tuple(pool.workers),
            sampler=sampler,
            taken=self,
            opened=state["delivered"],
            seconds=float.fromhex(state.get("seconds") or "0x0p+0"),
            remade=list(state.get("remade", ())),
            again=self.held_at("draw", "begin"),
            seen=tuple(state.get("seen", ())),
            moved=dict(state.get("moved", ())),
            moves_unseen=bool(state.get("moves_unseen", False)),
            anew=bool(state.get("anew", False)),
        )


def running_task() -> Any:
    """The task of asyncio that this is called in, if it is called in one."""
    asyncio: Any = sys.modules.get("asyncio")
    running = asyncio is not None and asyncio._get_running_loop() is not None
    return asyncio.current_task() if running else None


@dataclass(eq=False)
class Ledger:
    """All passes over one loader. Of several iterators alive at once, the one begun last is the loader's
    position."""

    generators: list[Any] = field(default_factory=list)
    holding: held.Holding = field(default_factory=held.Holding)
    watch: lazy.Watch = field(default_factory=lazy.Watch)
    begun: int = 0
    followers: int = 0  # trackers attached
    pending: Resume | None = None
    latest: Pass | None = None
    doubts: Doubts = field(default_factory=Doubts)  # of the run, where the loader is part of one
    step: Callable[[], int] | None = None  # the run's, where the script's own loop draws from the loader
    taken: Callable[[], None] = lambda: None  # called before the script continues from the loaded position
    moved: Callable[[], None] = lambda: None  # ... and after what it draws from there
    lead: lead.Lead = field(default_factory=lead.Lead)
    noting: bool = False  # every draw is noted
    # of a resumed pass: epochs that its samplers were told, and those that they are at
    told: tuple[tuple[int, int], ...] = ()
    opening: str = ""  # who opens the next iterator, where it is not the script itself
    site: str = ""  # where the script opens the iterator that it trains from
    # the pass whose beginning is the position, where somebody begins all of it again
    anchor: Anchor | None = None
    name: str = "a DataLoader"
    elsewhere: str = ""  # who draws, where it is not the thread that trains
    task: Any = None  # asyncio's, that has drawn last
    thread: int = field(default_factory=threading.get_ident)
    source: Callable[[], Any] = lambda: None  # the loader: not held, see above
    _looks: int = 0
    # batches of the latest pass that the loop was given, where somebody stands between and reads ahead
    used: int | None = None
    _alive: list[Pass] = field(default_factory=list)
    _returned: Resume | None = None  # a loaded position that was taken up, and given back
    # how it stood when the latest pass was left
    _before_left: tuple[Pass, Resume | None, Resume | None, int] | None = None

    def attend(self, step: Callable[[], int], taken: Callable[[], None], moved: Callable[[], None]) -> None:
        """The loader is drawn from by a script's own loop, whose boundaries we see."""
        self.step, self.taken, self.moved = step, taken, moved
        self.noting = not self.lead.settled or self.lead.held > 0

    def resume_for(self, site: str) -> Resume | None:
        """The loaded position, if an iterator that is opened there is to continue from it."""
        resume = self.pending
        if resume is None or self.step is None or (resume.phase != INSIDE and resume.persistent):
            return resume
        return resume if resume.state.get("site", "") in ("", site) else None

    def begin(self, passage: Pass, resumed: bool = False) -> None:
        self.begun += not resumed  # a resumed pass was counted when it was begun, by another incarnation
        if resumed and passage.remade:
            self.lead.resume(len(passage.remade))
        passage.site = self.opening
        if self.latest is not None and self.latest.phase == BETWEEN:
            passage.former, self.latest.former = self.latest, None
        self._alive.append(passage)
        self.latest, self._before_left = passage, None

    def finish(self, passage: Pass) -> None:
        if self.step is not None:
            passage.ended = self.step()
        self._end(passage, BETWEEN)

    def leave(self, passage: Pass) -> None:
        if passage is self.latest and passage.inside:
            self._before_left = (
                passage,
                self.pending,
                self._returned,
                -1 if self.step is None else self.step(),
            )
        self._end(passage, LEFT)

    def take_back(self) -> None:
        """It was no `break`: an exception has freed the iterator on its way out. The pass stands where it was
        interrupted."""
        if self._before_left is None:
            return
        passage, pending, returned, step = self._before_left
        # run.batches() has counted the step when the exception came by; the run takes that back, too.
        if passage.phase == LEFT and self.step is not None and abs(self.step() - step) <= 1:
            passage.phase, self.latest, self.pending, self._returned = INSIDE, passage, pending, returned
            self._alive.append(passage)

    def _end(self, passage: Pass, phase: str) -> None:
        if passage.phase != INSIDE:
            return
        passage.phase = phase
        if self.noting and self.used is None:
            self.lead.ended(passage)
            self._settled()
        if passage in self._alive:
            self._alive.remove(passage)
        passage.restore()
        # A peek (`next(iter(loader))`) inside a pass must not make that pass forgotten.
        if self.latest is passage and self._alive:
            self.latest = self._alive[-1]
        # Nor must one that the script does before its loop use up what was loaded.
        if (
            phase == LEFT
            and passage.taken is not None
            and self.step is not None
            and passage.site != sites.BATCHES
        ):
            self._returned = passage.taken
            self.pending = passage.taken if self.pending is None else self.pending

    def epoch_over(self) -> None:
        """An epoch is over. What was opened in it and left again without a step (by a zip() that ended with
        its first) is no longer waited for."""
        if self.pending is not None and self.pending is self._returned:
            self.pending = None
        if self.latest is not None and self.latest.phase == BETWEEN:
            self.latest.before_end = None  # a consumer that has seen the end has also come to it

    # ---- draws and steps -----------------------------------------------------------------------------------

    def draw(self, passage: Pass) -> tuple[Noted, rng.Parts | None]:
        """A batch is about to be drawn."""
        noted = (self.note(passage), rng.take_parts() if passage.pool is None else None)
        passage.recent.append(noted)
        return noted

    def boundary(self) -> None:
        """A step of the script's loop is over."""
        latest = self.latest
        for passage in self._alive:
            passage.taken = None  # it was trained from
        if self.pending is not None and latest is not None and latest.inside and latest.here:
            self._passed_over(self.pending)
        if self.task is not None:
            self._look_at_task(self.task)
        if self.elsewhere and self.used is None and self.anchor is None:
            self.doubts.add(
                f"`{self.name}` is drawn from by another {self.elsewhere}, ahead of the steps "
                "that use its batches",
                "Let the loader itself work ahead: DataLoader(..., num_workers=1), iterated in the thread "
                "that trains.",
            )
        if self.noting and latest is not None and latest.here and self.anchor is None:
            self._look(latest)
        if not self.noting or self.used is not None:
            return
        if not self.site and latest is not None and latest.here:
            self.site = latest.site
        self.lead.boundary(latest)
        if self.lead.unclear:
            self.lead.unclear = False
            between.look_for_calls(sys._getframe(), self.name, self.doubts)
        self._settled()

    def _look_at_task(self, task: Any) -> None:
        """A coroutine that has drawn and is not over keeps where it is to itself: its epoch, a batch."""
        self.task = None
        if not task.done() and task is not running_task():
            self.elsewhere = f"coroutine (`{task.get_coro().__qualname__}`)"

    def _look(self, latest: Pass) -> None:
        """What is between the loader and the loop; in the first steps only."""
        iterator = latest.iterator() if latest.iterator is not None else None
        if iterator is not None and latest.inside and self._looks < _LOOKS:
            self._looks += 1
            between.look(iterator, self.name, self.doubts)

    def _passed_over(self, resume: Resume) -> None:
        """The script trains from an iterator that it has opened elsewhere than the last time."""
        self.pending, self.site = None, ""
        if resume.phase == INSIDE:
            self.doubts.add(
                f"the data position that was loaded (batch {resume.state['delivered']} of a pass that was "
                "opened at "
                f"`{resume.state.get('site')}`) was not used, since the loader was opened at another place "
                "first",
                "Open the loader that you train from at the same place in every incarnation, or iterate with "
                "run.batches().",
            )

    def _settled(self) -> None:
        if self.lead.settled and self.noting:
            self.noting = self.lead.held > 0
            for passage in self._alive:
                passage.recent = deque(passage.recent, maxlen=self.lead.held)

    def position(self) -> dict[str, Any]:
        """What was trained: the loader's position before the draws that no step has used yet."""
        latest = self.latest
        if self.anchor is not None:
            return self._beginning(*self.anchor)
        if self.used is not None and latest is not None:
            held = latest.here - self.used
            # the end was seen by who reads ahead, and not by the loop
            if held <= 0 and latest.before_end is not None:
                return state_of(latest.before_end, self.site)
            # another thread would make them with the loop's generators
            return {**self._before(latest, held), "remade": ()}
        held = self.held()
        if held and latest is not None:
            return self._before(latest, held)
        if latest is not None and latest.before_end is not None and self._end_is_ahead(latest):
            return state_of(latest.before_end, self.site)
        return state_of(self.note(), self.site)

    def _end_is_ahead(self, latest: Pass) -> bool:
        """Whether the end of a pass was seen by who reads ahead, and no step has come to it yet. Of
        run.batches(), the loop that has ended is counted instead."""
        if (
            self.step is None
            or self.pending is not None
            or latest.phase != BETWEEN
            or latest.site == sites.BATCHES
        ):
            return False
        return self.step() - latest.ended <= self.lead.held

    def held(self) -> int:
        """The draws that no step has used yet."""
        latest, held = self.latest, self.lead.held
        if not held or latest is None or self.pending is not None or latest.phase == LEFT:
            return 0
        # to see the end was a draw, too; since then every step used one
        if latest.phase == BETWEEN and self.step is not None:
            held = max(0, held - max(1, self.step() - latest.ended))
        return held

    def is_ahead(self, value: Any) -> bool | None:
        """Whether a value of the script is a batch that the resumed script draws again. None: unknown yet."""
        return (
            self.lead.has(value, self.held())
            if self.noting and self.used is None and self.anchor is None
            else False
        )

    def _before(self, latest: Pass, held: int) -> dict[str, Any]:
        """The position before the last `held` draws."""
        drawn = list(latest.recent)
        if latest.former is not None and len(drawn) < held:
            drawn = [*latest.former.recent, *drawn]
        drawn = drawn[-held:] if held > 0 else []
        if not drawn:
            return state_of(self.note(), self.site)
        return {**state_of(drawn[0][0], self.site), "remade": tuple(parts for _, parts in drawn)}

    def anchor_here(self, opened: bool) -> None:
        """The latest pass will be begun again, by who draws from it: until further notice the position is
        before its beginning. `opened`: its iterator was made before that one began."""
        if self.anchor is None and self.latest is not None:
            self.anchor = (self.latest, self.begun if opened else self.begun - 1, opened)

    def _beginning(self, passage: Pass, begun: int, opened: bool) -> dict[str, Any]:
        """Told when it is saved: by then it is known what has changed since."""
        phase, draw = (INSIDE, passage.draw) if opened else (BETWEEN, None)
        pool, holding = passage.pool, self.holding
        # workers that are started for it get a seed first
        starts = not opened and pool is not None and pool.made_for is passage
        drawn_from = pool.created[3] if pool is not None and starts else passage.begin[3]
        now = holding.now() if passage.held is None else holding.then(passage.held)
        where = (
            phase,
            0,
            0,
            draw,
            passage.workers_at_begin,
            drawn_from,
            tuple(holding.moving),
            now,
            0,
            0.0,
        )
        state = state_of((None, begun, passage, *where), passage.site)
        state["anew"] = opened
        if not opened:  # who begins it again may have a new sampler
            state["held"] = held.saved(tuple(holding.moving), None, None, now, passage.began_with())
        if starts:
            state["pool"] = None
        return state

    def note(self, passage: Pass | None = None) -> Noted:
        """This moment, for state_of(): taken at every batch, and told only when somebody asks."""
        drawn_from = rng.hold_generators(self.generators) if self.generators else ()
        if passage is None:
            passage = self.latest
        holding = self.holding
        if passage is None:
            return (self.pending, self.begun, None, FRESH, 0, 0, None, (), drawn_from, (), {}, 0, 0.0)
        pool = passage.pool
        workers = () if pool is None else tuple(pool.workers)
        where = (passage.phase, passage.delivered, passage.failed, passage.draw, workers)
        holds = (tuple(holding.moving), holding.now(), len(passage.moved), passage.seconds)
        return (self.pending, self.begun, passage, *where, drawn_from, *holds)


def state_of(noted: Noted, site: str = "") -> dict[str, Any]:
    """The position at that moment. Nothing in it changes afterwards."""
    (
        pending,
        begun,
        passage,
        phase,
        delivered,
        failed,
        draw,
        workers,
        drawn_from,
        moving,
        now,
        often,
        seconds,
    ) = noted
    generators = rng.told_generators(drawn_from)
    if pending is not None:
        return {**pending.state, "generators": generators}
    remembered = passage is not None and (phase == INSIDE or (phase == LEFT and _persistent(passage)))
    return {
        "kind": KIND,
        "version": VERSION,
        "begun": begun,
        "phase": phase,
        "delivered": delivered,
        "failed": failed,
        "generators": generators,
        "facts": None if passage is None else passage.facts,
        "epochs": () if passage is None else passage.epochs,
        "begin": passage.begin if remembered else None,
        "draw": draw if remembered else None,
        "pool": None if passage is None else _pool_entry(passage, workers, remembered),
        # absent where it was saved before worlds could change
        "sampler": None if passage is None else passage.sampler,
        "seconds": round(seconds, 3).hex() if seconds else "",
        "site": site or ("" if passage is None else passage.site),
        "seen": _seen(passage, delivered + failed) if remembered else (),
        "moved": tuple(itertools.islice(passage.moved.items(), often)) if remembered else (),
        "moves_unseen": passage.moves_unseen if remembered else False,
        "held": held.saved(moving, passage.held, passage.held_at_draw, now, passage.began_with())
        if remembered
        else held.saved(moving, None, None, now),
    }


def _seen(passage: Pass, done: int) -> seen.Marks:
    if not passage.indices and not passage.glimpses:
        return passage.seen  # nothing was made again yet
    if passage.iterable:
        return () if passage.moves_unseen else seen.of_batches(passage.glimpses, done)
    return seen.of_indices(passage.indices, done)


def check(state: dict[str, Any]) -> None:
    if state.get("kind") != KIND or state.get("version") != VERSION:
        raise errors.MismatchError(
            f"The saved data position is of kind {state.get('kind')!r}, version {state.get('version')!r}, "
            "but "
            f"this loader needs kind {KIND!r}, version {VERSION}. It was saved with another loader class or "
            "another release of lastcall: use the same loader class, or leave the loader out of protect() "
            "to "
            f"start its data from the beginning."
        )


def _persistent(passage: Pass) -> bool:
    return passage.pool is not None and passage.pool.persistent


def _pool_entry(passage: Pass, delivered: tuple[Any, ...], remembered: bool) -> tuple[Any, ...] | None:
    pool = passage.pool
    if pool is None or not (remembered or pool.persistent):
        return None
    # The batches of an iterable dataset are made again from the start of the pass, so its workers start from
    # there.
    replayed = remembered and passage.iterable
    return (pool.created, pool.persistent, passage.workers_at_begin if replayed else delivered)
