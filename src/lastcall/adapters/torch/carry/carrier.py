"""Finds what the script's loop carries, saves it with the state, and puts it back where the resumed loop
begins.

What a local is for is read from the source (`places`). Attributes, globals and containers are watched: what
is another at a boundary than where the loop began is carried. Values are read at boundaries that are looked
at, on the training thread, and never in between.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from lastcall.adapters.torch.carry import calls, classes, frames, movers, owners, places, values
from lastcall.adapters.torch.carry.handed import Handed
from lastcall.adapters.torch.carry.kept import Kept
from lastcall.adapters.torch.carry.remade import Remade
from lastcall.core.checkpoint.doubts import Doubts
from lastcall.script.source.scopes import Loop

log = logging.getLogger("lastcall")
_TOLD = 8  # names in a log line
_REMEDY = "Hand it to protect(), or keep it in `state = run.carry(...)`."

_OFTEN = 8
_NOTHING: frozenset[str] = frozenset()

Saved = dict[str, Any]


class Carrier:
    """`state`: what was handed over. `doubts`: where it says what it can not save. `is_ahead`: whether a
    value is a batch that was read ahead, which belongs to the loader's position: the resumed script draws it
    again. None: unknown yet. `reads_ahead`: whether the script has drawn such batches. None, too."""

    def __init__(
        self,
        state: Callable[[], Mapping[str, object]],
        doubts: Doubts,
        is_ahead: Callable[[object], bool | None] = lambda _: False,
        reads_ahead: Callable[[], bool | None] = lambda: False,
    ) -> None:
        self._state = state
        self._doubts = doubts
        self._is_ahead = is_ahead
        self._reads_ahead = reads_ahead
        self._ahead: set[tuple[str, str]] = set()  # names that held such a batch last
        self._left: set[str] = set()  # ... and of them, what the last look has left to the loader's position
        self._begun: set[Loop] = set()  # of the script's own that have asked where to continue
        self._undecided = False  # whether all that a loop with tick() carries can be put back
        self._handed = Handed({})
        self._thread: int | None = None
        self._entered: FrameType | None = None
        self._above: list[frames.Space] = []  # of the modules whose functions led to the block
        self._owners: list[owners.Owner] = []
        self._looked_at: tuple[int, ...] = ()  # the frames in which they were found
        self._marks: dict[str, dict[str, Any]] = {}  # by owner: what each name was when it was first seen
        self._moving: dict[str, set[str]] = {}  # by owner: names that have changed since
        self._fresh = Remade()
        self._remade = False  # there are objects that a pass replaces by others of the same name
        self._first: dict[tuple[str, str], type] = {}  # by frame and name: what it was when the loop began
        self._functions: dict[tuple[str, str], object] = {}  # by frame and name: what it did then
        self._modes: dict[str, bool] = {}  # of the models, at the last boundary
        self._reads = 0
        self._learned = 0.0
        self._read: Saved = {}  # what was read last
        self._told: dict[str, set[str]] = {}
        self._places: dict[str, set[places.Place]] = {}  # by frame: where it stood in its loops
        self._over = False  # the script's own loop has ended
        self._returned: dict[str, set[str]] = {}  # by frame: names that were put back
        self.resumed_over = False  # the checkpoint was saved behind the end of the script's own loop
        self.kept = Kept()
        self.pending: Saved = {}  # of the checkpoint, until the loop that it was saved in has begun

    # ---- the run -------------------------------------------------------------------------------------------

    def enter(self, frame: FrameType | None) -> None:
        """The block begins: what is reachable from here is looked at for the first time."""
        self._thread = threading.get_ident()
        frames.belongs(frame)
        self._entered = next(frames.of_script(frame), None)
        self._above = [frames.space(each) for each in frames.of_script(frame)]
        self._handed = Handed(self._state())
        if self.pending.get("tick") or self.pending.get("over"):
            self._put_back(list(self.chain(frame)), final=False, early=True)
        self._looked(list(self.chain(frame)), anew=True)

    def leave(self) -> None:
        self._entered, self._thread = None, None
        self._read, self._marks, self._owners = {}, {}, []

    def begin(self, frame: FrameType | None, *, final: bool) -> None:
        """A loop begins. `final`: it is the innermost one of those that the checkpoint was saved in."""
        self._thread = threading.get_ident()
        chain = list(self.chain(frame))
        self._remember(chain)
        self._handed = Handed(self._state())
        if self.pending:
            self._put_back(chain, final=final)
            if final:
                self.pending = {}
        for key in self._fresh.keys(chain, self._entered):
            self._marks.pop(key, None)
        self._looked(chain, anew=True)

    def ticked(self, frame: FrameType | None) -> None:
        """The first step of a loop of the script's own is over."""
        self.pending = {}
        self._ticking = True
        if self._thread is not None:
            self._check_tick(list(self.chain(frame)))

    _ticking = False

    def loop_is_over(self) -> None:
        """The block ends behind a loop of the script's own. What that has carried is saved as it is now, and
        the loop of a run that is started again ends where it asks."""
        self._over = True

    def came_to(self, frame: FrameType | None) -> list[tuple[places.Place, frozenset[str]]]:
        """Where the script's frames stand, each with the names that were put back there."""
        found = map(places.of, self.chain(frame))
        return [(place, frozenset(self._returned.get(place.key, ()))) for place in found]

    def asked(self, frame: FrameType | None) -> bool:
        """The script asks where to continue. In the head of its own loop (`range(run.step, n)`), what the
        loop carries can be put back. Says whether it is there, for the first time: a pass that ends without a
        tick() comes to the head again."""
        chain = list(self.chain(frame))
        place = places.of(chain[0]) if chain else None
        if (
            place is None
            or not place.loops
            or not places.asks(place.loops[-1], place.line)
            or place.loops[-1] in self._begun
        ):
            return False
        self._begun.add(place.loops[-1])
        if self.pending.get("tick"):
            self._put_back(chain, final=True)
        return True

    def read(self, *, thorough: bool) -> Saved:
        """All that is carried now. On another thread, what was carried at the last boundary. `thorough`: also
        look for what has begun to change; otherwise that is done now and then, since it costs more than the
        rest."""
        found = self.pending
        if not found:
            if self._thread == threading.get_ident():
                self._reads += 1
                thorough = thorough or self._reads <= _OFTEN or not self._reads & (self._reads - 1)
                began = time.thread_time()
                chain = list(self.chain(sys._getframe(1)))
                self._read = self._looked(chain, thorough=thorough)
                self._modes = {
                    owner.key: owner.value.training
                    for owner in self._owners
                    if isinstance(owner, owners.Inside)
                }
                if self._undecided:
                    self._check_tick(chain)
                self._learned += (time.thread_time() - began) * thorough
            found = self._read
        kept = self._kept()
        return {**found, "kept": kept} if kept else found

    def learned(self) -> float:
        """Seconds of looking for what changes since this was last asked: few looks of a whole run, that its
        copies need not pay for."""
        learned, self._learned = self._learned, 0.0
        return learned

    def unseen(self) -> str:
        """For who saves what was read at the last boundary: what has begun to change, and was not read
        there."""
        for owner in self._owners:
            marks, moving = self._marks.get(owner.key, {}), self._moving.get(owner.key, _NOTHING)
            # An evaluation has begun since the last boundary: that is no change at the boundary.
            evaluates = self._modes.get(owner.key, _NOTHING) is marks.get("training")
            for name, value in list(owner.read().items()):
                if (
                    name in moving
                    or not values.is_value(value)
                    or name not in marks
                    or (evaluates and _is_mode(name))
                ):
                    continue
                if not _is_same(marks[name], _mark(value)):
                    return (
                        f"`{owner.shown(name)}` has begun to change since the loop's variables were last read"
                    )
        return ""

    def _kept(self) -> Saved:
        found = {}
        for name, value in self.kept._read().items():
            try:
                found[name] = values.savable(value, lambda _: False)
            except values.Unsavable as why:
                self._doubts.add(
                    f"`{name}` of run.carry() is not saved: {why}",
                    "Carry numbers, text, tensors, lists and dicts of them.",
                )
        return found

    def load(self, saved: object) -> None:
        if isinstance(saved, dict) and isinstance(kept := saved.pop("kept", None), dict):
            self.kept._load(self._made(kept) or {})
        if isinstance(saved, dict) and all(
            isinstance(part, dict) for part in (saved.get("frames"), saved.get("owners"))
        ):
            self.pending, self.resumed_over = saved, saved.get("over") is True
            both = (*saved["owners"].items(), *saved["frames"].items())
            self._moving.update({key: set(named) for key, named in both if isinstance(named, dict)})

    # ---- reading -------------------------------------------------------------------------------------------

    def chain(self, frame: FrameType | None) -> Iterator[FrameType]:
        """The script's frames up to the one that entered the block."""
        for each in frames.of_script(frame):
            yield each
            if each is self._entered:
                return

    def _looked(self, chain: list[FrameType], *, anew: bool = False, thorough: bool = True) -> Saved:
        """Objects of a script may answer anything; an error of theirs, or of ours, never costs the training
        nor the weights."""
        try:
            return self._scan(chain, anew=anew, thorough=thorough)
        except Exception as error:
            log.debug("What the loop carries could not be read", exc_info=True)
            self._doubts.add(
                f"what the loop carries could not be read: {type(error).__name__}: {error}", _REMEDY
            )
            return {}

    def _scan(self, chain: list[FrameType], *, anew: bool = False, thorough: bool = True) -> Saved:
        """`anew`: look for owners everywhere, and not only where names have got other values since the last
        look."""
        named: Saved = {}
        roots: list[tuple[str, Any]] = []
        looped = self._ticking
        self._left.clear()
        anew = anew or tuple(map(id, chain)) != self._looked_at
        quick = not anew and not thorough and not self._remade
        for frame in chain:
            place, own = places.of(frame), frames.variables(frame)
            if place.node is None and place.key not in named:
                looped = True
                named[place.key] = self._unread(place, own, anew)
            if place.loops:
                looped = True
                if place.key not in named and place.node is not None:
                    self._places.setdefault(place.key, set()).add(place)
                    named[place.key] = self._locals(place, own, frame)
            elif self._over and place.key not in named:
                named[place.key] = self._locals_behind(place.key, own)
            if quick:
                continue
            names = own if anew else place.remade
            roots += [
                (f"{place.key}: {name}", own[name])
                for name in names
                if name in own and not place.is_left(name)
            ]
        if anew:
            self._owners = self._known_again(self._find(roots, chain))
            self._looked_at = tuple(map(id, chain))
        if chain and not quick:
            calls.check_recursion(chain, self._doubts)
        found: Saved = {}
        if quick:
            for owner in self._owners:
                self._take(owner, found)
        elif self._look(roots, found, anew=anew):  # there are objects that were not there before
            return self._scan(chain, anew=True)
        # with its frame
        written = {f"{key}: {name}" for key, variables in named.items() for name in variables}
        for key in (self._left | written) & found.keys():
            del found[key]
        named = {key: values_ for key, values_ in named.items() if values_}
        if self._over:
            return {
                "frames": named,
                "owners": found,
                "over": True,
                **({"tick": True} if self._ticking else {}),
            }
        if not looped or not (named or found):
            return {}
        if not quick:
            calls.check_iterator(chain[0], found, self._doubts)
        self._tell(named, found, chain)
        return {"frames": named, "owners": found, **({"tick": True} if self._ticking else {})}

    def _known_again(self, found: list[owners.Owner]) -> list[owners.Owner]:
        """An object that another frame leads to has another key: what moves of it is known already."""
        before = {id(owner.value): owner.key for owner in self._owners}
        for owner in found:
            key = before.get(id(owner.value), owner.key)
            if key != owner.key and key in self._moving:
                self._moving.setdefault(owner.key, set()).update(self._moving[key])
        return found

    def _look(self, roots: list[tuple[str, Any]], found: Saved, *, anew: bool) -> bool:
        known = {id(owner.value) for owner in self._owners}
        remade = (
            []
            if anew or not roots
            else [owner for owner in self._find(roots, []) if id(owner.value) not in known]
        )
        self._remade = bool(remade)
        stale = False
        for owner in (*self._owners, *remade):
            stale = self._watch(owner, found) or stale
        return stale and not anew

    def _find(self, roots: list[tuple[str, Any]], chain: list[FrameType]) -> list[owners.Owner]:
        walk = owners.Walk(self._handed)
        if chain:  # a model or an optimizer may be kept where no frame leads to it
            for name, value in self._state().items():
                if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
                    walk.below(f"protect: {name}", value)
        for key, value in roots:
            walk.below(key, value)
        begun = [*map(frames.space, chain), *self._above] if chain else []
        for space, code in frames.spaces(begun):
            module = str(space.get("__name__", ""))
            changed = places.rebound(space, code)
            if changed is not None and changed[0]:
                walk.found.append(owners.Globals(f"{module}: ", space, *changed))
            if not any(each.f_globals is space and frames.is_module(each) for each in chain):
                for name, value in list(space.items()):
                    if not name.startswith("__"):
                        walk.below(f"{module}: {name}", value)
        return walk.found

    def _locals(self, place: places.Place, own: Mapping[str, Any], frame: FrameType) -> Saved:
        named = {}
        for name in place.asked:
            if name not in own:
                continue
            value = own[name]
            if type(value) is float and place.is_time(name, value):
                continue
            if self._drawn_again(place.key, name, value):
                self._left.add(f"{place.key}: {name}")
                continue
            if type(value) in values.PLAIN:
                if value is not True or not self._is_guard(place, own, name):
                    named[name] = value
                continue
            if values.is_silent(value) or place.is_time(name, value):
                if name in place.carried:
                    self._check_function(place, name, value)
                continue
            try:
                named[name] = values.savable(value, self._handed)
            except values.Unsavable as why:
                if owners.is_object(value):
                    self._take_late(place, name, value, named)
                elif name in place.carried and why.matters and not movers.is_room(value):
                    self._doubt(f"`{name}` ({places.shown(place)})", why)
        if named and not frames.is_module(frame) and not frames.writable():
            self._doubts.add(
                f"the loop carries {_listed(named)} ({places.shown(place)}), which this Python "
                "cannot put back",
                _REMEDY,
            )
        return named

    def _locals_behind(self, key: str, own: Mapping[str, Any]) -> Saved:
        """Of what the loops of a frame needed, what is there behind them. The script may have used a name
        for something else since: that is no reason for a warning."""
        named = {}
        for place in self._places.get(key, ()):
            for name in place.asked:
                if name not in own or place.is_time(name, own[name]):
                    continue
                if values.is_silent(own[name]) or self._drawn_again(key, name, own[name]):
                    continue
                if self._is_guard(place, own, name):
                    continue
                with contextlib.suppress(values.Unsavable):
                    named[name] = values.savable(own[name], self._handed)
        return named

    def _check_function(self, place: places.Place, name: str, value: Any) -> None:
        """The loss of a second phase: a function that is another one than when the loop began."""
        does = values.code_of(value)
        if self._functions.setdefault((place.key, name), does) != does:
            self._doubts.add(
                f"the loop carries `{name}` ({places.shown(place)}), which is another function now, and is "
                "not saved",
                "Keep its name in a variable, and look the function up by it: functions[name].",
            )

    def _take_late(self, place: places.Place, name: str, value: Any, named: Saved) -> None:
        """An object whose attributes are looked at; where the loop has made it, a resumed script has none to
        put them back into."""
        if (
            name not in place.carried
            or name in place.fresh
            or self._first.get((place.key, name), type(value)) is type(value)
        ):
            return
        try:
            named[name] = values.savable_object(value, self._handed, owners.is_object)
        except values.Unsavable as why:
            if why.matters:
                self._doubt(f"`{name}` ({places.shown(place)})", why)

    def _remember(self, chain: list[FrameType]) -> None:
        """What the script has made when its loop begins."""
        for frame in chain:
            key = places.of(frame).key
            for name, value in frames.variables(frame).items():
                self._first.setdefault((key, name), type(value))
                if values.is_silent(value):
                    self._functions.setdefault((key, name), values.code_of(value))

    def _unread(self, place: places.Place, own: Mapping[str, Any], anew: bool) -> Saved:
        """Of a frame whose source is not available (a notebook's cell, exec()): what is another value than
        when the loop began."""
        marks = self._marks.setdefault(place.key, {})
        if anew:
            marks.clear()
        moving = self._moving.setdefault(place.key, set())
        found = {}
        for name, value in own.items():
            if name.startswith("__") or not values.is_value(value):
                continue
            mark = _mark(value)
            if name not in moving and _is_same(marks.setdefault(name, mark if anew else _NOTHING), mark):
                continue
            moving.add(name)
            if self._drawn_again(place.key, name, value):
                continue
            try:
                found[name] = values.savable(value, self._handed)
            except values.Unsavable:
                continue  # as likely as not the script creates it again in each pass
        return found

    def _drawn_again(self, key: str, name: str, value: Any) -> bool:
        """Whether it is for the loader's position to bring back: a batch that was read ahead, or the None
        behind the last one."""
        if value is None:
            return (key, name) in self._ahead
        if type(value) in values.PLAIN:
            return False
        if movers.is_room(value):
            return self._reads_ahead() is not False or self._is_ahead(movers.waiting(value)) is not False
        if self._is_ahead(value):
            self._ahead.add((key, name))
            return True
        self._ahead.discard((key, name))
        return False

    def _watch(self, owner: owners.Owner, found: Saved) -> bool:
        """Take what has changed. Says whether there are objects in it that were not examined."""
        marks = self._marks.setdefault(owner.key, {})
        kind = f"<{type(owner).__name__}>"  # a module has two owners under one key: Inside, and Attributes
        new = kind not in marks
        marks[kind] = True
        moving = self._moving.get(owner.key, _NOTHING)
        stale = False
        for name, value in list(owner.read().items()):
            if name in moving and values.is_value(value):
                continue
            if not values.is_value(value):
                # made by the loop: a resumed script has none
                if marks.get(name, _NOTHING) is None and owners.is_object(value):
                    self._moving.setdefault(owner.key, set()).add(name)
                stale = stale or (
                    owner.open and id(value) != marks.setdefault(name, id(value)) and owners.is_object(value)
                )
                marks[name] = id(value)
                continue
            mark = _mark(value)
            if not _is_same(marks.setdefault(name, mark if new else _NOTHING), mark):
                self._moving.setdefault(owner.key, set()).add(name)
                del marks[name]
        self._take(owner, found)
        return stale

    def _take(self, owner: owners.Owner, found: Saved) -> None:
        moving = self._moving.get(owner.key)
        if not moving:
            return
        taken = {}
        for name, value in owner.some(moving).items():
            if type(value) is float and owner.is_time(name, value):
                continue
            if value is True and self._is_guard(owner, owner.read(), name):
                continue
            if self._drawn_again(owner.key, name, value):
                found.pop(owner.key, None)  # what its name stood for when the loop began
                continue
            try:
                taken[name] = self._savable(value)
            except values.Unsavable as why:
                if why.matters and (values.is_value(value) or owners.is_object(value)):
                    self._doubt(f"`{owner.shown(name)}`", why)
        if taken:
            found[owner.key] = {**found.get(owner.key, {}), **taken}

    def _is_guard(self, where: owners.Owner | places.Place, own: Mapping[str, Any], name: str) -> bool:
        """Whether it says that something is open that a resumed script has to open again."""
        return where.is_guard(name, lambda other: self._is_lost(own, other))

    def _is_lost(self, own: Mapping[str, Any], name: str) -> bool:
        value = own.get(name)
        if type(value) in values.PLAIN or values.is_silent(value) or self._handed(value):
            return False
        try:
            self._savable(value)
        except values.Unsavable:
            return True
        return False

    def _savable(self, value: Any) -> Any:
        if type(value) in values.PLAIN:
            return value
        if owners.is_object(value):
            return values.savable_object(value, self._handed, owners.is_object)
        return values.savable(value, self._handed)

    # ---- telling -------------------------------------------------------------------------------------------

    def _doubt(self, what: str, why: values.Unsavable) -> None:
        self._doubts.add(f"the loop carries {what}, which is not saved: {why}", why.remedy or _REMEDY)

    def _tell(self, named: Saved, found: Saved, chain: list[FrameType]) -> None:
        new = []
        for key, each in (*named.items(), *found.items()):
            told: set[str] = self._told.setdefault(key, set())
            if told.issuperset(each):
                continue
            owner = (
                next((owner for owner in self._owners if owner.key == key), None) if key in found else None
            )
            new += [
                _shown(key, name, owner) if key in found else name
                for name in each
                if name not in told and not _is_mode(name)
            ]
            told.update(each)
        if new:
            place = next((each for each in map(places.of, chain) if each.loops), None)
            where = f" ({places.shown(place)})" if place is not None else ""
            log.info("Also saving what the loop carries: %s%s", _listed(new), where)

    def _check_tick(self, chain: list[FrameType]) -> None:
        """Nothing tells when the first step of a loop with tick() begins, unless its head asks for
        `run.step`. What the script sets between the block's begin and the loop is then lost."""
        self._undecided = False
        if any(_asks(place) for place in map(places.of, chain)):
            return
        for frame in chain:
            place = places.of(frame)
            if not place.loops or place.node is None:
                continue
            late = [
                name
                for name in sorted(place.carried & place.needed)
                if frame is not self._entered or places.set_between(place, name)
            ]
            own = frames.variables(frame)
            late = [
                name
                for name in late
                if name in own and _saves(own[name], self._handed) and not place.is_time(name, own[name])
            ]
            ahead = {name: self._is_ahead(own[name]) for name in late}
            self._undecided = self._undecided or None in ahead.values()
            late = [name for name in late if ahead[name] is False]
            if late:
                self._doubts.add(
                    f"the loop carries {_listed(late)} ({places.shown(place)}), set where tick() cannot put "
                    "it back",
                    "Loop over `run.steps(n)` or `range(run.step, n)`, or keep it in `state = "
                    "run.carry(...)`.",
                )

    def loses(self, place: places.Place, name: str, value: object) -> bool:
        """Whether a name matters that is not put back: batches that were read ahead are drawn again."""
        return (
            _saves(value, self._handed)
            and not place.is_time(name, value)
            and not values.is_silent(value)
            and self._is_ahead(value) is False
        )

    # ---- putting back --------------------------------------------------------------------------------------

    def _put_back(self, chain: list[FrameType], *, final: bool, early: bool = False) -> None:
        """`final`: the script does not move iterators any more on its way to the loop, and they cannot be
        moved back."""
        saved: dict[str, Any] = self.pending["frames"]
        done: set[str] = set()
        roots: list[tuple[str, Any]] = []
        for frame in chain:
            place, own = places.of(frame), frames.variables(frame)
            named = self._made(saved.get(place.key))
            if named is not None and place.key not in done:
                done.add(place.key)
                wanted = set(own) if early or place.node is None else place.needed
                self._write(
                    frame,
                    {
                        name: each
                        for name, each in named.items()
                        if name in wanted and (final or _rests(each))
                    },
                    own,
                )
            roots += [(f"{place.key}: {name}", value) for name, value in frames.variables(frame).items()]
        for owner in self._find(roots, chain):
            named = self._made(self.pending["owners"].get(owner.key))
            if named is not None:
                for name, value in named.items():
                    if final or _rests(value):
                        self._fill(owner, name, value)

    def _made(self, named: object) -> Saved | None:
        """What was saved under these names. A class that the script no longer has is named, and its value
        left as it is."""
        found: Saved = {}
        for name, value in named.items() if isinstance(named, dict) else ():
            try:
                found[name] = classes.made(value)
            except (LookupError, ValueError) as error:
                self._doubts.add(
                    f"`{name}` was not put back: the script no longer has {error}",
                    "Keep the class under its name.",
                )
        return found if isinstance(named, dict) else None

    def _write(self, frame: FrameType, named: Saved, own: Mapping[str, Any]) -> None:
        self._returned.setdefault(places.of(frame).key, set()).update(named)
        made = {name: _like(own.get(name), value) for name, value in named.items()}
        frames.write(frame, made)

    def _fill(self, owner: owners.Owner, name: str, value: Any) -> None:
        live = owner.some((name,)).get(name)
        if (
            value is None
            and type(live) not in values.PLAIN
            and values.is_value(live)
            and self._is_prefetcher(owner)
        ):
            return  # it has drawn again, and moved to a device, what came behind the end of the last pass
        if type(value) in values.MUTABLE and values.put(live, value):
            return
        if isinstance(live, torch.nn.Module | torch.optim.Optimizer):
            return
        owner.write(name, _like(live, value))

    def _is_prefetcher(self, owner: owners.Owner) -> bool:
        return bool(self._reads_ahead()) and any(
            hasattr(type(each), "__next__") for each in owner.read().values()
        )


def _rests(value: Any) -> bool:
    return not movers.is_state(value) or value[movers.TAG] == "generator"


def _like(live: Any, value: Any) -> Any:
    """As the script would have it: values that are changed in place belong to it alone."""
    if movers.is_state(value):
        movers.put(live, value)
        return live
    return value


def _mark(value: Any) -> Any:
    return value if type(value) in values.PLAIN else values.mark(value)


def _is_same(before: Any, mark: Any) -> bool:
    return before is mark or (
        type(before) is type(mark) and (before == mark or (mark != mark and before != before))
    )


def _saves(value: Any, handed: Handed) -> bool:
    try:
        values.savable(value, handed)
    except values.Unsavable:
        return False
    return True


def _shown(key: str, name: str, owner: owners.Owner | None) -> str:
    """`owner`: None for one that a pass has made, and that is gone by now."""
    if owner is None:
        owner = owners.Owner(key, None) if name else owners.Items(key, None)
    return owner.shown(name)


def _is_mode(name: str) -> bool:
    """Of each layer of a model: train() and eval() change them all."""
    return name.rpartition(".")[2] == "training"


def _asks(place: places.Place) -> bool:
    return any(places.head_reads(loop, places.READ_AGAIN) for loop in place.loops)


def _listed(names: Any) -> str:
    told = [f"`{name}`" for name in names]
    return ", ".join(told[:_TOLD]) + (f" and {len(told) - _TOLD} more" if len(told) > _TOLD else "")
