"""A PyTorch training process as the core sees it: a position, a state that can be captured at a boundary,
rescued from a side thread, and restored.

The boundary copy is what makes a rescue exact: everything small that changes outside the optimizer step
(randomness, data position, scheduler, counters, BatchNorm's buffers) as it was at the last boundary. Large
tensors are read live, since they only change inside the step. The copy is taken at every boundary that can
afford it: it may cost a thousandth of the run's time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lastcall import errors
from lastcall.adapters.torch import hooks, hyperparameters
from lastcall.adapters.torch.carry.carrier import Carrier
from lastcall.adapters.torch.casualties import Casualties
from lastcall.adapters.torch.data import items
from lastcall.adapters.torch.data import loaders as data
from lastcall.adapters.torch.data.noticing import Noticed
from lastcall.adapters.torch.last_state import recorder
from lastcall.adapters.torch.last_state.shared_state import Together
from lastcall.adapters.torch.overlooked import Overlooked
from lastcall.adapters.torch.randomness.rng import Captured, Randomness
from lastcall.adapters.torch.state.entries import StateSet
from lastcall.adapters.torch.tensors import cuda, sampling
from lastcall.core.checkpoint.doubts import Doubts
from lastcall.core.engine import digest
from lastcall.core.guard import mailbox
from lastcall.core.proof import pieces
from lastcall.core.subject import Loading, Stored
from lastcall.core.sync.gate import Gate
from lastcall.formats import tree
from lastcall.types import Capture, Group, Source

log = logging.getLogger("lastcall")
_SHARE = 1000.0  # a copy may cost one part in so many of the time
# seconds of copies that a run has from the start: short steps are rescued exactly from the first on
_CREDIT = 0.05
WRITTEN = "~"  # how often the tensors of a name were written to
_TOGETHER = 0.5  # ... and with many ranks, whose copies are also mail


class Copy(NamedTuple):
    """The small state at a boundary."""

    boundary: tuple[int, int]
    place: tuple[bool, int]
    batches: int
    small: object
    randomness: Captured
    loaders: list[dict[str, Any]]
    fingerprint: tuple[list[int], list[bytes]]


class TorchSubject:
    loads_by_itself = False
    reads_all = True  # all files of its checkpoints are read here, and none by a framework
    carrier: Carrier | None = None

    def __init__(self, state: dict[str, object], *, check: bool = True) -> None:
        self.in_pass = False  # the training thread is between two boundaries
        self.step = 0
        self.epoch = 0
        self.inside = False  # the last boundary was inside an epoch's batches()
        self.loops = 0  # batches() loops that ended in this epoch before it
        self.loop = 0  # loops of the block that have begun: steps(), epochs(), or batches() without them
        self.saved_loop = 0  # the one of them that the checkpoint was saved in
        # run.save() has saved it behind a batches() loop, after some of what the script does there
        self.saved_behind = False
        self.batches = 0  # batches that the current batches() loop has handed out, by all incarnations
        self.length: int | None = None  # ... and how many it has, where that is known
        # the epoch and the step where this incarnation saw one begin
        self.epoch_began: tuple[int, int] | None = None
        self.mark = 0  # gate.steps at the last boundary
        self.step_seconds: float | None = None
        self.due = 0  # the step whose boundary must be looked at
        self._requested = False  # a side thread has asked for the next one since the last was looked at
        self._copy_at = 0.0  # when the next copy may be taken
        self._every_boundary = True  # steps are long enough to afford a copy at each of their boundaries
        # those that are only known from run.batches(), in order of first use
        self.loaders: list[data.Followed] = []
        self.waiting = False  # gradients wait for their optimizer at this boundary
        self.metrics: Mapping[str, object] = {}
        self._randomness = Randomness()
        self._resumed_loaders: list[Any] = []
        # the loaders of this epoch's batches() that protect() does not know, in order
        self._asked: list[data.Tracker] = []
        self._drawn_from: data.Tracker | None = None  # by the current batches() loop
        self.lags: list[int] = []  # of the counters around it
        self.drawn_again = 0  # batches that the last incarnation had read ahead
        self.restored_randomness: Captured | None = None
        self._epoch_randomness: Captured | None = None  # as it was when the current epoch began
        # as it was when the block began, in the first incarnation
        self._block_randomness: Captured | None = None
        self._credit = _CREDIT
        self._timed: tuple[float, int] | None = None
        self._gate = Gate()
        self._hooks: hooks.StepHooks | None = None
        self._casualties: Casualties | None = None
        self._copy: Copy | None = None
        # called when the script continues from a loaded position
        self.taken: Callable[[], bool] = lambda: True
        self.prelude: set[str] | None = None  # names that the script changes before its loop; None: unknown
        # optimizers that wait for parameter groups which the script has added inside its loop
        self.owed: set[str] = set()
        # what was, when a loop was left in the middle of a pass
        self._broken_off: tuple[Any, int] | None = None
        self.together = Together()
        self.doubts = Doubts()
        self.overlooked: Overlooked | None = None  # looks for what trains and was not handed over
        self.lenient = False  # a checkpoint with other models or optimizers is taken for what it has
        self.hold(state, check=check)

    def hold(self, state: dict[str, object], *, check: bool = True) -> None:
        """This is what is saved. A framework may know it only when its loop is about to begin."""
        self._trackers = {id(loader): data.track(loader) for loader in _loaders_in(state)} if check else {}
        for tracker in self._trackers.values():
            tracker.doubts = self.doubts
        self._noticed = Noticed(self._follow, self._trackers, self.doubts)
        self.state = StateSet(state, self._trackers, check=check)
        self.state.carried = self.carrier
        self.given = hyperparameters.of(state)  # as the script has made its optimizers
        # DTensors themselves: the version of what they hold locally does not move
        self._live_tensors = list(self.state.tensors())
        self._samples = sampling.sample(self.state.live())
        self.together.hold(self.state)

    def carry(self) -> Carrier:
        """Save what the script's loop carries, too."""
        self.carrier = self.state.carried = Carrier(
            lambda: self.state.values, self.doubts, self._is_ahead, self._reads_ahead
        )
        return self.carrier

    def _reads_ahead(self) -> bool | None:
        leads = [tracker.ledger.lead for tracker in self._attended()]
        return any(lead.held for lead in leads) or (None if any(lead.undecided for lead in leads) else False)

    def _is_ahead(self, value: object) -> bool | None:
        """Whether it is a batch that the loop has read ahead: the resumed script draws it again."""
        found: bool | None = False
        for tracker in self._attended():
            one = tracker.ledger.is_ahead(value)
            if one:
                return True
            found = None if one is None else found
        return found

    def install(self, gate: Gate) -> None:
        self._gate = gate
        on_device = any(tensor.is_cuda for tensor in self.state.tensors())
        seen = self.overlooked.stepped if self.overlooked is not None else lambda _: None
        self._hooks = hooks.StepHooks(
            gate, on_device, self.state.optimizers(), seen, self.stop_at_next_boundary
        )
        self._hooks.install()
        self.by_hand = hooks.ByHand(self._live_tensors)
        self._casualties = Casualties(gate)
        self._casualties.install()
        for tracker in self._trackers.values():
            self._attach(tracker)
        if type(self) is TorchSubject:  # a framework has loaders of its own, and knows where they stand
            self._noticed.install()

    def _follow(self, loader: Any, anything: bool = False) -> data.Tracker:
        tracker: data.Tracker
        if anything and not data.is_loader(loader):
            tracker = items.ItemsTracker(loader, lambda: [tracker.ledger for tracker in self._attended()])
        else:
            tracker = data.track(loader)
        tracker.worlds, tracker.doubts = self.together.worlds, self.doubts
        self._attach(tracker)
        return tracker

    def _attach(self, tracker: data.Tracker) -> None:
        tracker.attach()
        if isinstance(tracker, data.LoaderTracker):
            tracker.attend(lambda: self.step, self._position_taken, self.keep_randomness)

    def remove(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        if self.overlooked is not None:
            self.overlooked.end()
        if self._casualties is not None:
            self._casualties.remove()
        self.together.leave()
        self._noticed.remove()
        if self.carrier is not None:
            self.carrier.leave()
        for tracker in (*self._trackers.values(), *self.loaders):
            tracker.detach()

    # ---- many ranks: see `together` ------------------------------------------------------------------------

    def join(self, run: str, incarnation: int, folder: Path) -> None:
        self._credit = max(self._credit, _TOGETHER)

        def writer(box: mailbox.Mailbox) -> recorder.Mail:
            values, trackers = self.state.values, self._trackers
            return recorder.Mail(
                box, self, values, trackers, self._randomness, self._positions, lambda: self._every_boundary
            )

        self.together.join(run, incarnation, folder, writer)

    def holdings(self) -> tuple[tuple[int, ...], ...]:
        return self.together.holdings()

    def unreplicated_digest(self) -> str:
        return self.together.alone()

    def part_of(self, rank: int, step: int, mine: Capture) -> Capture | None:
        return self.together.part_of(rank, step, mine)

    # ---- position ------------------------------------------------------------------------------------------

    @property
    def boundary(self) -> tuple[int, int]:
        return self.step, self.epoch

    @property
    def ordinal(self) -> int:
        return self.step + self.epoch

    @property
    def settled(self) -> bool:
        return self._gate.steps == self.mark

    def stepped(self) -> object:
        """Something to compare with later: another where the optimizer has stepped, or, where there is none,
        the parameters have changed."""
        return self._gate.steps or self.by_hand.seen()

    def stop_at_next_boundary(self) -> None:
        self._requested = True  # first: attend_from() reads it last
        self.due = 0

    def attend(self) -> None:
        """This boundary is about to be looked at. Who asks from here on means the next one."""
        self._requested = False

    def attend_from(self, due: int) -> None:
        """Look at the boundary of this step, and at all before it whose copy is affordable, or that the hooks
        learn from."""
        learning = self._hooks is not None and self._hooks.learning
        self.due = self.step + 1 if self._every_boundary or learning else due
        if self._requested:
            self.due = 0

    def retry_copy(self) -> None:
        if self.due > self.step and time.perf_counter() >= self._copy_at:
            self.due = 0

    def copy_every_boundary(self) -> None:
        self._credit = math.inf  # what the copies cost no longer matters
        self._copy_at = 0.0
        self._every_boundary = True
        self.due = 0

    def tracker(self, loader: object) -> data.Tracker:
        """The tracker of a loader that run.batches() is given."""
        self._drawn_from = self._asked_for(loader)
        return self._drawn_from

    def _asked_for(self, loader: object) -> data.Tracker:
        known = self._trackers.get(id(loader))
        if known is not None and (known in self._asked or known not in self.loaders):
            return known
        place = len(self._asked)
        if known is None:
            known = self._noticed.hand_over(loader) or self._follow(loader, anything=True)
            self._place(known, id(loader), place)
        self._asked.append(known)
        return known

    def _place(self, tracker: data.Tracker, key: int, place: int) -> None:
        """A loader has no name: it is known by its place among those of its epoch. One that is created again
        in every epoch takes the place of the one before, which is over; otherwise a resume would give it the
        position of the first epoch's."""
        if place < len(self.loaders):
            former = self.loaders[place]
            former.detach()
            for old in [old for old, kept in self._trackers.items() if kept is former]:
                del self._trackers[old]
            self.loaders[place] = tracker
        else:
            self.loaders.append(tracker)
        self._trackers[key] = tracker
        if place < len(self._resumed_loaders) and self._resumed_loaders[place] is not None:
            tracker.load(self._resumed_loaders[place])
            self._resumed_loaders[place] = None

    def loop_begins(self) -> None:
        for tracker in self._attended():
            tracker.loop_begins()

    def _used(self) -> int:
        """Batches of the current loop, without those that the script has read ahead: a resumed one draws
        them, and counts them, again."""
        return max(0, self.batches - self._ahead())

    def _ahead(self) -> int:
        drawn_from = self._drawn_from
        return drawn_from.ledger.held() if isinstance(drawn_from, data.LoaderTracker) else 0

    def _attended(self) -> list[data.LoaderTracker]:
        trackers = (*self._trackers.values(), *self._noticed.trackers())
        return [tracker for tracker in trackers if isinstance(tracker, data.LoaderTracker)]

    def new_epoch(self) -> None:
        self.inside, self.loops, self.batches = False, 0, 0
        self.epoch_began = (self.epoch, self.step)
        self._asked = []
        for tracker in self._attended():
            tracker.epoch_over()

    def _positions(self) -> list[Any]:
        """Where the loaders stand; one that this incarnation has not come to yet stands where the last one
        left it."""
        known = [tracker.state() for tracker in self.loaders] + self._resumed_loaders[len(self.loaders) :]
        return known + self._noticed.positions()

    def arrive(self, now: float, *, passed: bool = True) -> None:
        """A boundary: the state belongs together. Taken note of, and copied where that is affordable.
        `passed`: something was done since the last one."""
        assert self._hooks is not None
        if self._hooks.learning and passed:
            self._hooks.end_of_pass()
        if self.overlooked is not None:
            if not self.overlooked.looking:
                self.overlooked.later()
            elif passed:
                self.overlooked.passed()
            else:
                self.overlooked.begin()
            now = time.perf_counter()  # looks are few: no reason to copy less often afterwards
        if passed:
            for tracker in self._attended():
                tracker.boundary()
            self.waiting = self._hooks.waits_after_step or self._gate.steps == self.mark
        self.mark = self._gate.steps
        self._gate.settle()
        if self.step > 0:
            self.together.look()
        if now >= self._copy_at:
            self.refresh(now)

    def break_off(self) -> None:
        """A loop was left in the middle of a pass, by `break` or by an exception: it looks the same from
        inside. Where it was an exception, mend() takes back what follows from it."""
        here = (
            self.step,
            self.inside,
            self.in_pass,
            self.mark,
            self.waiting,
            self.loops,
            self.batches,
            self._copy,
        )
        self._broken_off = (here, self._gate.begun)

    def went_on(self) -> None:
        """The script continues after the loop: it was a `break`."""
        self._broken_off = None

    def mend(self) -> None:
        """It was an exception: the last boundary is the one before the pass that raised."""
        if self._broken_off is not None:
            here, self._gate.begun = self._broken_off
            (
                self.step,
                self.inside,
                self.in_pass,
                self.mark,
                self.waiting,
                self.loops,
                self.batches,
                self._copy,
            ) = here
            for tracker in self._trackers.values():
                if isinstance(tracker, items.ItemsTracker):
                    tracker.take_back()
        for attended in self._attended():
            attended.ledger.take_back()

    def refresh_if_stale(self) -> None:
        """Where a long stay begins (an evaluation after the last batch), the copy should be of the last
        boundary."""
        if self._copy is not None and self._copy.boundary != self.boundary:
            self.refresh(time.perf_counter())

    def refresh(self, now: float) -> None:
        """Take the boundary copy, and say when the next may be taken. Its cost is the thread's own time: on a
        busy machine the clock would count what others do, and short steps would be left without a copy."""
        began = time.thread_time()
        self._copy = Copy(
            self.boundary,
            (self.inside, self.loops),
            self._used(),
            self.state.small(),
            self._randomness.capture(),
            self._positions(),
            self._fingerprint(),
        )
        if self.state.unsaved:
            self._name_unsaved()
        if self._timed is not None and self.step > self._timed[1]:
            usual = (now - self._timed[0]) / (self.step - self._timed[1])
            self.step_seconds = usual if self.step_seconds is None else 0.7 * self.step_seconds + 0.3 * usual
        self._timed = (now, self.step)
        if self._broken_off is None:  # a boundary that may not be one is not for others to rely on
            began -= self.together.post(self._copy)
        cost = time.thread_time() - began - (self.carrier.learned() if self.carrier is not None else 0.0)
        self._credit -= cost
        rich = self._credit > 0
        self._copy_at = now if rich else now + _SHARE * cost
        self._every_boundary = rich or (self.step_seconds is not None and self.step_seconds >= _SHARE * cost)

    def settle_randomness(self) -> None:
        """Put the generators back to where the checkpoint found them. Called where the loop begins, since a
        script draws from them on its way there (weights, loaders) as it did the first time."""
        if self.restored_randomness is not None:
            self._randomness.restore(self.restored_randomness)
            self.restored_randomness = None

    def block_begins(self) -> None:
        """What the script draws between here and its loop (noise that stays fixed), it draws again. The loop
        puts the generators back where it begins; where no loop of ours does, they stand as it needs them."""
        if self.restored_randomness is None:
            self._block_randomness = self._randomness.capture()
        elif self._block_randomness is not None:
            self._randomness.restore(self._block_randomness)
        else:
            self.put_randomness_back()

    def epoch_begins(self, *, again: bool) -> None:
        """Note the generators, or put them back where an interrupted epoch comes `again`: what the script
        draws at its top was drawn before."""
        if not again or self._epoch_randomness is None:
            self._epoch_randomness = self._randomness.capture()
        else:
            self._randomness.restore(self._epoch_randomness)

    def _position_taken(self) -> None:
        if self.taken():
            self.put_randomness_back()

    def put_randomness_back(self) -> None:
        """As settle_randomness(), but not for good: what the script draws before its loop, or an interrupted
        epoch before its batches, was drawn once already."""
        if self.restored_randomness is not None:
            self._randomness.restore(self.restored_randomness)

    def keep_randomness(self) -> None:
        """What was drawn on the way to the loop is drawn for good: an uninterrupted run draws it inside."""
        if self.restored_randomness is not None:
            self.restored_randomness = self._randomness.capture()

    # ---- captures ------------------------------------------------------------------------------------------

    def glance(self, look: Callable[[Source], str]) -> dict[str, str]:
        """Every piece of what was handed over, with something that tells cheaply whether it was changed: see
        `prelude`."""
        document, groups = self.state.capture(self.state.values)
        found = pieces.named(Capture(self.step, document, groups + self._gradients()), look)
        ours = tuple(f"{path}." for path in self.state.sources())
        found = {name: seen for name, seen in found.items() if not name.startswith(ours)}
        return {
            **found,
            **{f"{name}.{WRITTEN}": repr(often) for name, often in self.state.versions().items()},
        }

    @property
    def behind(self) -> bool:
        """Whether a batches() loop of this epoch has ended, and neither the next one nor the next epoch has
        begun."""
        return self.inside and self.loops > 0 and not self.batches

    def capture(self) -> Capture:
        self.look_for_overlooked(last=False)
        cuda.settle()
        document, groups = self.state.capture()
        groups += self._gradients() if self.waiting else ()
        hidden = (
            "gradients are being accumulated where they cannot be read"
            if self.waiting and self.state.hidden_gradients()
            else ""
        )
        loaders = self._positions()
        place = (self.inside, self.loops, self._used())
        return self._assemble(
            document,
            groups,
            self._randomness.capture(),
            loaders,
            self.step,
            hidden,
            place,
            behind=self.behind,
        )

    def look_for_overlooked(self, *, last: bool) -> None:
        """Before a save. `last`: it is the last one of this incarnation."""
        if self.overlooked is not None:
            self.overlooked.before_save(last=last)
            for path, names in self.state.reshaped().items():
                self.doubts.add(
                    f"`{path}` was changed inside the block: "
                    f"`{names[0]}`{' and others' if len(names) > 1 else ''} came, went or got "
                    "another shape, and a resumed script, which builds the first form, would be refused",
                    "Build the model in its last form before protect().",
                )

    def outline(self) -> Capture:
        return self.capture()

    def unfinished(self) -> Capture:
        """The state in the middle of a pass, for a user who asks: right now, and marked as what it is."""
        cuda.settle()
        return self._live("saved in the middle of a step")

    def rescue(self) -> Capture:
        """The last completed step. Runs on a side thread while the training thread is somewhere between two
        mutations."""
        return self._last_boundary(None)

    def _last_boundary(self, digests: list[str] | None) -> Capture:
        """`digests`: of the large arrays, as they were at this boundary. numpy does not count changes as
        torch does."""
        copy = self._copy
        assert copy is not None
        if self._gate.steps != self.mark:
            return self._live(
                "the optimizer has stepped since the last boundary; what follows it in that step is missing"
            )
        if copy.boundary != self.boundary:
            return self._live(
                f"steps are short: randomness and data position were last copied at step {copy.boundary[0]}"
            )
        document, groups = self.state.capture(copy.small)
        because = ""
        if self.waiting and (self._gradients() or self.state.hidden_gradients()):
            because = "gradients were being accumulated"
        elif self._gate.steps == 0:
            because = "no torch optimizer has stepped: nothing tells whether the state is between two updates"
        elif digests is None and self.state.arrays():
            because = "nothing tells whether a large numpy array has changed since the last boundary"
        elif self.carrier is not None:
            because = self.carrier.unseen()
        capture = self._assemble(
            document, groups, copy.randomness, copy.loaders, self.step, because, (*copy.place, copy.batches)
        )
        mark = self._gate.steps
        # `p.data = ...` while they are being read must not free them
        kept = sampling.storages(self.state.tensors())

        def still() -> bool:
            """What changes outside the gate shows only afterwards. Against this boundary, whichever has come
            since."""
            same = self._gate.steps == mark and copy.fingerprint == self._fingerprint() and kept is not None
            return same and (digests is None or digests == self._digests())

        return dataclasses.replace(capture, still=still)

    def behind_gate(self) -> Capture:
        self.refresh(time.perf_counter())
        return self._last_boundary(self._digests())

    def _digests(self) -> list[str]:
        return [
            digest.of(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            for array in self.state.arrays()
        ]

    def untouched(self) -> bool:
        return (
            self._gate.steps == self.mark
            and self._copy is not None
            and self._copy.fingerprint == self._fingerprint()
        )

    def unrescuable(self) -> str:
        if self._copy is None:
            return "nothing has been copied yet"
        if hooks.updates_in_backward(self.state.tensors()):
            return (
                "an optimizer that updates inside backward() leaves no moment at which the state is whole; "
                "this is not supported"
            )
        same_boundary = self._copy.boundary == self.boundary and self._gate.steps == self.mark
        if same_boundary and self._copy.fingerprint != self._fingerprint():
            return (
                "the weights were changed outside optimizer.step() (averaged weights swapped in for an "
                "evaluation?)"
            )
        return ""

    def _live(self, because: str) -> Capture:
        """Everything as it is now. Another thread may be changing small containers: tried a few times."""
        step = self.step + (self.in_pass and self._gate.steps != self.mark)
        for attempt in range(5):
            try:
                document, groups = self.state.capture()
                loaders = self._positions()
                place = (self.inside, self.loops, self._used())
                return self._assemble(
                    document, groups, self._randomness.capture(), loaders, step, because, place
                )
            except RuntimeError:  # a dict changed its size while it was walked
                if attempt == 4:
                    raise
                time.sleep(0.01)
        raise AssertionError

    def _assemble(
        self,
        document: dict[str, object],
        groups: tuple[Group, ...],
        randomness: Captured,
        loaders: list[dict[str, Any]],
        step: int,
        because: str,
        place: tuple[bool, int, int],
        *,
        behind: bool = False,
    ) -> Capture:
        run = {
            "step": step,
            "epoch": self.epoch,
            "inside": place[0],
            "loops": place[1],
            "given": self.given,
            "batches": place[2],
            "loop": self.loop,
            "randomness": self._randomness.to_document(randomness),
            "loaders": tree.encode(loaders, "loaders", tree.refuse),
            "world": self.together.size,
        }
        if self.loop and self._block_randomness is not None:
            run["block_randomness"] = self._randomness.to_document(self._block_randomness)
        if place[0] and self._epoch_randomness is not None:
            run["epoch_randomness"] = self._randomness.to_document(self._epoch_randomness)
        if any(self.lags):
            run["lags"], run["ahead"] = list(self.lags), self._ahead()
        if behind:
            run["behind"] = True
        if self.prelude is not None:
            run["prelude"] = sorted(self.prelude)
        if laid_out := self.together.buckets():
            run["buckets"] = laid_out
        self._name_unsaved()
        if self.doubts:
            run["doubts"] = self.doubts.document()
        return Capture(
            step,
            {"run": run, **document},
            groups,
            not because,
            because,
            self.numbers(),
            doubt=self.doubts.because,
        )

    def _name_unsaved(self) -> None:
        """What was savable when the run began, and is not any more."""
        for path, why in self.state.unsaved.items():
            what, _, remedy = why.partition(". ")
            self.doubts.add(
                f"`{path}` is not saved: {what.removeprefix(path).lstrip(': ')}",
                remedy or "Put back what was there.",
            )

    def _gradients(self) -> tuple[Group, ...]:
        group = self.state.gradients()
        return () if group is None else (group,)

    def numbers(self) -> dict[str, float]:
        """What was reported last, as plain numbers."""
        numbers = {}
        for name, value in self.metrics.items():
            try:
                numbers[name] = float(value)  # type: ignore[arg-type]
            except (TypeError, ValueError, RuntimeError, OverflowError):
                continue
        return numbers

    def _fingerprint(self) -> tuple[list[int], list[bytes]]:
        """The version of all that a rescue reads live, and some bytes of a few: `.data` writes do not bump
        the version."""
        versions = [tensor._version for tensor in self._live_tensors]
        return versions, [
            ctypes.string_at(address, nbytes)
            for tensor, places, nbytes in self._samples
            for address in places(tensor)
        ]

    # ---- restore -------------------------------------------------------------------------------------------

    def prepare(self, document: dict[str, object], stored: Stored) -> Loading:
        run = document.get("run")
        if not isinstance(run, dict):
            raise errors.MismatchError(
                "the checkpoint was not saved by protect() in a training with torch. Use another directory."
            )
        loading = self.state.prepare(document, stored, lenient=self.lenient)
        hyperparameters.compare(run.get("given"), self.given, self.state.values)
        return _Restore(self, run, loading, loading.unmatched, loading.owed)

    def resume_at(self, run: dict[str, Any]) -> None:
        world = run.get("world", 1)
        saved = world if type(world) is int and world > 0 else 1
        self.together.worlds = (saved, self.together.size)
        for tracker in self._trackers.values():
            tracker.worlds = self.together.worlds
        counts = step, epoch, loops, batches = (
            run.get("step"),
            run.get("epoch"),
            run.get("loops"),
            run.get("batches", 0),
        )
        if not all(type(number) is int and number >= 0 for number in counts):
            raise errors.CheckpointError(
                f"state.json says step {step!r}, epoch {epoch!r}, loops {loops!r}, batches {batches!r}"
            )
        assert (
            isinstance(step, int)
            and isinstance(epoch, int)
            and isinstance(loops, int)
            and isinstance(batches, int)
        )
        loaders = tree.decode(run.get("loaders"), tree.refuse_tag)
        if not isinstance(loaders, list):
            raise errors.CheckpointError("state.json has no list of loaders")
        loaders = self._noticed.resume(loaders)
        randomness = self._randomness.from_document(run.get("randomness"))
        rank = self.together.rank
        if rank >= saved:
            log.info(
                "rank %d is new (the checkpoint is of %d): its randomness is made from that of rank 0",
                rank,
                saved,
            )
            randomness = self._randomness.forked(randomness, rank)
        self.restored_randomness = randomness
        self._block_randomness = self._epoch_randomness = None
        if "block_randomness" in run and rank < saved:
            self._block_randomness = self._randomness.from_document(run["block_randomness"])
        if "epoch_randomness" in run and rank < saved:
            self._epoch_randomness = self._randomness.from_document(run["epoch_randomness"])
        self.together.resumed_buckets(run.get("buckets", []))
        self.doubts.resume(run.get("doubts", []))
        self.saved_loop = run["loop"] if type(run.get("loop")) is int else 0
        self.saved_behind = run.get("behind") is True
        lags, ahead = run.get("lags", []), run.get("ahead", 0)
        if isinstance(lags, list) and all(type(lag) is int and 0 <= lag < 1 << 20 for lag in (*lags, ahead)):
            self.lags[:], self.drawn_again = lags, ahead
        prelude = run.get("prelude")
        self.prelude = (
            {name for name in prelude if isinstance(name, str)} if isinstance(prelude, list) else None
        )
        self.step, self.epoch, self.loops, self.batches, self._resumed_loaders = (
            step,
            epoch,
            loops,
            batches,
            loaders,
        )
        self.inside = run.get("inside") is True


class _Restore:
    """StateSet's loading, and the position with it."""

    def __init__(
        self,
        subject: TorchSubject,
        run: dict[str, Any],
        loading: Loading,
        unmatched: list[tuple[str, str]],
        owed: set[str],
    ) -> None:
        self._subject = subject
        self._owed = owed
        self._run = run
        self._loading = loading
        self._unmatched = unmatched
        self.whole = not subject.reads_all
        self.targets = loading.targets
        self.saved_step = run.get("step")

    def finish(self) -> None:
        self._subject.resume_at(self._run)
        self._loading.finish()
        self._subject.owed = self._owed
        for reason, remedy in self._unmatched:
            self._subject.doubts.add(reason, remedy)


def _loaders_in(value: object, depth: int = 0) -> list[object]:
    """DataLoaders handed to protect(), at top level or in containers."""
    if data.is_loader(value):
        return [value]
    if depth > 20:
        return []
    items: list[object] = []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = list(value)
    return [loader for item in items for loader in _loaders_in(item, depth + 1)]
