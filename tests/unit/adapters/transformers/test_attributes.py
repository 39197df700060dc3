from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import torch

from lastcall.adapters.transformers.attributes import Attributes


def trainer(**own: Any) -> Any:
    return SimpleNamespace(**own)


def test_what_a_subclass_counts_is_copied() -> None:
    own = {
        "tokens": 5,
        "rate": 0.5,
        "title": "x",
        "on": True,
        "nothing": None,
        "pair": (1, 2.0),
        "seen": [1, [2, 3]],
        "sums": {"a": {"b": [1]}, 3: "three"},
        "recent": collections.deque([1, 2], maxlen=2),
        "lists": collections.defaultdict(list, loss=[1.0]),
        "ordered": collections.OrderedDict(a=1),
    }
    copied = Attributes(trainer(**own)).copy()
    assert copied == {**own, "recent": [1, 2], "lists": {"loss": [1.0]}, "ordered": {"a": 1}}
    assert {type(copied[name]) for name in ("sums", "lists", "ordered")} == {dict}


def test_the_copy_does_not_follow_later_changes() -> None:
    live = trainer(sums={"a": [1]}, count=1)
    copied = Attributes(live).copy()
    live.sums["a"].append(2)
    live.count = 2
    assert copied == {"sums": {"a": [1]}, "count": 1}


def test_what_is_no_count_is_left_out() -> None:
    class Special(dict[str, int]): ...

    loop: list[Any] = []
    loop.append(loop)
    own = {
        "tensor": torch.ones(1),
        "object": object(),
        "function": print,
        "in_list": [1, torch.ones(1)],
        "keys": {(1, 2): 3},
        "special": Special(a=1),
        "large": list(range(3000)),
        "nested": [[0] * 50] * 50,
        "loop": loop,
        "bytes": b"x",
        "set": {1},
    }
    assert Attributes(trainer(**own, kept=1)).copy() == {"kept": 1}


def test_what_is_the_trainers_own_or_ours_is_left_out() -> None:
    own = {
        "state": 1,
        "args": 2,
        "current_flos": 3,
        "_globalstep_last_logged": 4,
        "is_in_train": True,
        "_lastcall_took_over": True,
    }
    assert Attributes(trainer(**own, mine=1)).copy() == {"mine": 1}


def test_containers_keep_their_identity_and_their_kind() -> None:
    recent: collections.deque[int] = collections.deque(maxlen=2)
    lists: collections.defaultdict[str, list[float]] = collections.defaultdict(list, other=[9.0])
    inner = {"x": 0}
    live = trainer(recent=recent, lists=lists, nested={"inner": inner}, count=0, said=None)
    Attributes(live).restore(
        {
            "recent": [1, 2, 3],
            "lists": {"loss": [1.0]},
            "nested": {"inner": {"x": 5}, "new": [1]},
            "count": 7,
            "said": "x",
        }
    )
    assert live.recent is recent and list(recent) == [2, 3]
    assert live.lists is lists and lists == {"loss": [1.0]} and lists["new"] == []
    assert live.nested["inner"] is inner and live.nested == {"inner": {"x": 5}, "new": [1]}
    assert (live.count, live.said) == (7, "x")


def test_what_is_gone_or_has_become_something_else_is_left_as_it_is() -> None:
    thing = object()
    live = trainer(thing=thing, table={"a": 1})
    Attributes(live).restore({"gone": 3, "thing": [1], "table": [1]})
    assert vars(live) == {"thing": thing, "table": {"a": 1}}


def test_a_copy_that_was_restored_is_what_it_was() -> None:
    one = trainer(seen=[1, 2], sums={"a": 1.5}, pair=(1, 2), recent=collections.deque([1]))
    other = trainer(seen=[], sums={}, pair=(0, 0), recent=collections.deque())
    Attributes(other).restore(Attributes(one).copy())
    assert vars(other) == vars(one)
