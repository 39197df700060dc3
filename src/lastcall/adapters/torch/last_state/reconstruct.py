"""The part of a rank that is dead, made from its mail and from what a survivor would save of itself.

A boundary record of the step has everything that was the rank's own. An F record has what the forward moved
on: randomness, the positions of loaders, generators, buffers; the rest comes from the survivor, which runs
the same program. Two comparisons keep that honest. The last boundary records of both tell whether the rest is
the same on both ranks. And the survivor's own F record tells whether anything moved on between its forward
and its boundary: if nothing did there, nothing would have done with the dead one.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lastcall import errors
from lastcall.adapters.torch.last_state import state_record
from lastcall.adapters.torch.state.entries import CARRIED
from lastcall.core.guard import mailbox
from lastcall.formats import tree
from lastcall.types import Group, Source, TensorEntry

_MOVING = ("loader", "generator")
Place = tuple[str, str]


class Composed(NamedTuple):
    """A rank's part of a checkpoint: the document, and the tensors that are its own (and no piece of a shared
    one)."""

    document: dict[str, Any]
    groups: tuple[Group, ...]
    exact: bool
    because: str  # when not exact: why


def compose(
    document: dict[str, Any],
    groups: Sequence[Group],
    mail: Sequence[mailbox.Record],
    step: int,
    own: Sequence[mailbox.Record] = (),
) -> Composed:
    """The part of a dead rank at `step`. `document` and `groups` are the survivor's capture of that step,
    `mail` are the records of the dead rank, `own` those of the survivor."""
    draft = _Draft(document, groups)
    try:
        boundary, after = _letter(mailbox.newest(mail, step, "B")), _letter(mailbox.newest(mail, step, "F"))
        if boundary is not None:
            draft.take_boundary(boundary)
            return draft.finish(step, _left(boundary))
        if after is not None:
            draft.take_forward(after)
            return draft.finish(
                step, _left(after) or _unlike(mail, own, document) or _moved(document, groups, own, step)
            )
        last = min(mail, key=lambda record: (abs(record.step - step), -record.sequence), default=None)
        if last is not None:
            draft.take_randomness(state_record.read(last.data))
            because = (
                f"its randomness is that of step {last.step}, the newest recorded, and its data position "
                "that of another rank"
            )
            return draft.finish(step, because)
    except errors.CheckpointError as error:
        return _Draft(document, groups).finish(step, f"{error}; its small state is that of another rank")
    return draft.finish(
        step, "it has recorded no last state on this host; its small state is that of another rank"
    )


class _Draft:
    """The survivor's part, which becomes the dead one's piece by piece."""

    def __init__(self, document: dict[str, Any], groups: Sequence[Group]) -> None:
        self.document = copy.deepcopy(document)
        self._groups = groups
        self.entries: dict[Place, TensorEntry] = {
            (group.name, entry.name): entry
            for group in groups
            for entry in group.entries
            if entry.share is None
        }
        self._shared = {
            (group.name, entry.name) for group in groups for entry in group.entries if entry.share is not None
        }

    def take_boundary(self, letter: state_record.Received) -> None:
        epoch, inside, loops = letter.place
        self.document["run"].update(epoch=epoch, inside=inside, loops=loops)
        state = self.document["state"]
        for name, fragment in letter.names.items():
            if name in state:
                state[name] = fragment
                self.entries = {place: entry for place, entry in self.entries.items() if place[0] != name}
        self._take(letter)

    def take_forward(self, letter: state_record.Received) -> None:
        """Where the survivor stands in its epoch, the dead one would stand too."""
        state = self.document["state"]
        for name, fragment in letter.names.items():
            if name in state:
                state[name] = _grafted(state[name], fragment)
        self._take(letter)

    def take_randomness(self, letter: state_record.Received) -> None:
        """Of another step than the survivor's. Where that stands in its data, this one must stand too: ranks
        with other numbers of batches before them would wait for each other at the end, for ever."""
        self.document["run"].update(randomness=letter.randomness)

    def _take(self, letter: state_record.Received) -> None:
        self.document["run"].update(randomness=letter.randomness, loaders=letter.loaders)
        referred = set(_references(self.document["state"]))
        self.entries.update((place, entry) for place, entry in letter.tensors.items() if place in referred)
        refs = dict(_module_tensors(self.document["state"]))
        for key, entry in letter.buffers.items():
            place = refs.get(key)
            if place in self._shared:
                continue
            known = self.entries.get(place) if place is not None else None
            if (
                place is None
                or known is None
                or (known.dtype, tuple(known.shape)) != (entry.dtype, entry.shape)
            ):
                raise errors.CheckpointError(
                    f"its last state has a buffer {key[1]!r} that another rank does not have"
                )
            self.entries[place] = TensorEntry(known.name, entry.dtype, entry.shape, entry.source)

    def finish(self, step: int, because: str) -> Composed:
        self.document["run"]["step"] = step
        wanted = set(_references(self.document["state"]))
        kinds = {group.name: group for group in self._groups}
        made: dict[str, list[TensorEntry]] = {}
        for (group, name), entry in self.entries.items():
            if (group, name) in wanted:
                made.setdefault(group, []).append(entry)
        groups = []
        for name, entries in made.items():
            like = kinds.get(name, Group(name, ()))
            groups.append(Group(name, tuple(entries), like.frozen, like.rank))
        return Composed(self.document, tuple(groups), not because, because)


def _letter(record: mailbox.Record | None) -> state_record.Received | None:
    return None if record is None else state_record.read(record.data)


def _left(letter: state_record.Received) -> str:
    told = [
        f"{name!r} is that of another rank: {because}" for name, because in letter.left.items() if because
    ]
    return "; ".join(told)


def _unlike(mail: Sequence[mailbox.Record], own: Sequence[mailbox.Record], document: dict[str, Any]) -> str:
    """What an F record leaves to the survivor, compared between the two at the last boundary that both have
    mailed."""
    shared = {record.step for record in mail if record.phase == "B"} & {
        record.step for record in own if record.phase == "B"
    }
    if not shared:
        return "no boundary that both ranks recorded shows whether the rest of its state was the same"
    step = max(shared)
    theirs, ours = _letter(mailbox.newest(mail, step, "B")), _letter(mailbox.newest(own, step, "B"))
    assert theirs is not None and ours is not None
    for name in document["state"]:
        if name in theirs.names and not _same(name, theirs, ours):
            called = "what the loop carries" if name == CARRIED else repr(name)
            return f"{called} was not the same on the other ranks at step {step}"
    return ""


def _same(name: str, theirs: state_record.Received, ours: state_record.Received) -> bool:
    """Whether a name is the same on two ranks, but for what every rank moves on for itself."""
    if name not in ours.names:
        return False
    one, other = _still(theirs.names[name]), _still(ours.names[name])
    if one != other:
        return False
    return all(
        _bytes(theirs.tensors[place].source) == _bytes(ours.tensors[place].source)
        for place in _references(one)
    )


def _moved(
    document: dict[str, Any], groups: Sequence[Group], own: Sequence[mailbox.Record], step: int
) -> str:
    """What has moved on, on the survivor, between its forward and its boundary."""
    letter = _letter(mailbox.newest(own, step, "F"))
    if letter is None:
        return ""
    draft = _Draft(document, groups)
    before = dict(draft.entries)
    draft.take_forward(letter)
    if draft.document["run"]["randomness"] != document["run"]["randomness"]:
        return "random numbers are drawn between the forward and the boundary"
    if draft.document["run"]["loaders"] != document["run"]["loaders"]:
        return "batches are taken between the forward and the boundary"
    for name, fragment in document["state"].items():
        if draft.document["state"][name] != fragment:
            return f"{name!r} changes between the forward and the boundary"
    for place, entry in draft.entries.items():
        known = before.get(place)
        if known is not entry and (known is None or _bytes(known.source) != _bytes(entry.source)):
            return f"{place[1]!r} in {place[0]!r} changes between the forward and the boundary"
    return ""


def _bytes(source: Source) -> bytes:
    room = ctypes.create_string_buffer(max(source.nbytes, 1))
    source.read_into(ctypes.addressof(room), 0, source.nbytes)
    return room.raw[: source.nbytes]


# ---- documents ---------------------------------------------------------------------------------------------


def _grafted(document: Any, mailed: Any) -> Any:
    """The survivor's value with the mailed loaders and generators in it."""
    if _tag(mailed) in _MOVING:
        return mailed
    if isinstance(document, dict) and isinstance(mailed, dict) and document.keys() == mailed.keys():
        return {key: _grafted(item, mailed[key]) for key, item in document.items()}
    if isinstance(document, list) and isinstance(mailed, list) and len(document) == len(mailed):
        return [_grafted(item, other) for item, other in zip(document, mailed, strict=True)]
    return document


def _still(document: Any) -> Any:
    """A value without the loaders and generators in it."""
    if _tag(document) in _MOVING:
        return None
    if isinstance(document, dict):
        return {key: _still(item) for key, item in document.items()}
    return [_still(item) for item in document] if isinstance(document, list) else document


def _references(document: Any) -> Iterator[Place]:
    if _tag(document) == "tensor":
        yield document["g"], document["n"]
    elif isinstance(document, dict | list):
        for item in document.values() if isinstance(document, dict) else document:
            yield from _references(item)


def _module_tensors(state: dict[str, Any]) -> Iterator[tuple[tuple[int, str], Place]]:
    """Where the tensors of each module are, by its number and their names."""
    for number, module in enumerate(_modules(state)):
        for name, ref in module["tensors"]:
            yield (number, name), (ref["g"], ref["n"])


def _modules(document: Any) -> Iterator[dict[str, Any]]:
    """In the order in which mail._parts() comes upon them: containers are looked into, objects are not."""
    tag = _tag(document)
    if tag == "module":
        yield document
    elif tag is not None:
        pairs = document.get("pairs", ())
        for item in document.get("items", [value for _, value in pairs]):
            yield from _modules(item)
    elif isinstance(document, dict | list):
        for item in document.values() if isinstance(document, dict) else document:
            yield from _modules(item)


def _tag(document: Any) -> Any:
    return document.get(tree.TAG) if isinstance(document, dict) else None
