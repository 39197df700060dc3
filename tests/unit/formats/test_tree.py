from __future__ import annotations

import collections
import enum
import itertools
import json
import math
import os
import struct
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from lastcall import errors
from lastcall.formats import tree


class Point(NamedTuple):
    x: int
    y: int


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Grades(dict[str, int]):
    pass


class Box:
    def method(self) -> None: ...


def there_and_back(value: object) -> Any:
    text = json.dumps(tree.encode(value, "extra", tree.refuse), allow_nan=False)
    return tree.decode(json.loads(text), tree.refuse_tag)


def same(one: Any, other: Any) -> bool:
    """Equal in value, type, order and bits: 1, 1.0 and True are equal to `==`, and so are 0.0 and -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(k1, k2) and same(v1, v2)
            for (k1, v1), (k2, v2) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(itertools.starmap(same, zip(one, other, strict=True)))
    if isinstance(one, set | frozenset):
        return one == other and {type(item) for item in one} == {type(item) for item in other}
    return bool(one == other)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**53,
        2**53 + 1,
        -(2**64),
        10**20_000,
        0.1,
        1.0,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],  # a nan with a sign and a payload
        "",
        "naïve 🎲",
        "\ud83c\udfb2",  # two lone surrogates: JSON text would make one character of them
        "\x00",
        b"",
        bytes(range(256)),
        bytearray(b"abc"),
        1 + 2j,
        complex(-0.0, math.inf),
        [],
        [1, [2.0, ["3"]]],
        (),
        (1, (2, [3])),
        set(),
        {1, 2.5, "a", None, (1, "b"), frozenset({1})},
        frozenset({"a", "b"}),
        {},
        {"a": 1, "b": {"c": []}},
        {"b": 1, "a": 2},
        {"$": 1, "$ref": 2},
        {"\ud800": 1},
        {7**6000: {7**6000}, (7**6000,): 1},
        {1: "a", "1": "b", (1, 2): "c", None: "d", 2.5: "e"},
        collections.OrderedDict([("z", 1), ("a", (2,))]),
        collections.Counter({"a": 3, "b": -1}),
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(None, {1: 2}),
        collections.deque([1, 2], maxlen=5),
        collections.deque([(1,)]),
        range(1, 10, 3),
        range(2**70),
        slice(None, 5, -1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    again = there_and_back(value)
    assert same(again, value)
    assert same(there_and_back([value]), [value])
    if isinstance(value, collections.deque):
        assert again.maxlen == value.maxlen
    if isinstance(value, collections.defaultdict):
        assert again.default_factory is value.default_factory


def test_what_json_knows_stays_readable() -> None:
    value = {"step": 3, "names": ["a", "b"], "lr": 0.1, "done": False, "best": None}
    assert tree.encode(value, "extra", tree.refuse) == value


def test_attributes_of_an_ordered_dict_are_kept() -> None:
    state: Any = collections.OrderedDict(weight=1)
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    again = there_and_back({"model": state})["model"]
    assert same(again._metadata, state._metadata)
    copied = tree.copy(state)
    assert same(copied._metadata, state._metadata) and copied._metadata[""] is not state._metadata[""]


def test_an_attribute_that_hides_a_method_is_refused_on_both_ways() -> None:
    state: Any = collections.OrderedDict()
    state.items = 3
    with pytest.raises(errors.StateError, match=r"extra\.items: hides a method"):
        tree.encode(state, "extra", tree.refuse)
    with pytest.raises(errors.CheckpointError, match="no place for the attribute 'items'"):
        tree.decode({"$": "OrderedDict", "pairs": [], "attributes": {"items": 3}}, tree.refuse_tag)


def test_sets_are_written_in_the_same_order_whatever_the_hash_seed() -> None:
    script = (
        "import json; from lastcall.formats import tree;"
        "value = [{'a','b','c','d'}, {10, 9, 1}, {1, 'a', (2, 'b'), None, frozenset('xyz')}];"
        "print(json.dumps(tree.encode(value, 'x', tree.refuse)))"
    )
    seen = set()
    for seed in ("1", "2", "3"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        seen.add(
            subprocess.run(
                [sys.executable, "-c", script], env=environ, capture_output=True, check=True
            ).stdout
        )
    assert len(seen) == 1
    assert json.loads(seen.pop())[1] == {"$": "set", "items": [1, 9, 10]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 0, "extra['it'][1]: a function cannot be saved. Leave it out"),
        (Box().method, "extra['it'][1]: a function cannot"),
        (len, "extra['it'][1]: a function cannot"),
        (Box, "extra['it'][1]: a class cannot"),
        (json, "extra['it'][1]: a module cannot"),
        (iter([1]), "extra['it'][1]: an iterator (list_iterator) cannot"),
        (Point(1, 2), "extra['it'][1]: a named tuple ("),
        (Color.RED, "extra['it'][1]: an enum member ("),
        (Level.LOW, "extra['it'][1]: an enum member ("),
        (Grades(a=1), "Save dict(value) instead."),
        (Box(), "Box cannot be saved. Give it state_dict() and load_state_dict()"),
        (collections.defaultdict(lambda: 0), "a defaultdict that makes its values with <function"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path_with_a_remedy(value: object, message: str) -> None:
    with pytest.raises(errors.StateError) as caught:
        tree.encode({"it": (0, value)}, "extra", tree.refuse)
    assert message in str(caught.value)
    assert str(caught.value).startswith("extra['it'][1]: ")


def test_paths_lead_into_keys_sets_and_attributes() -> None:
    seen = []

    def foreign(value: object, path: str) -> object:
        seen.append(path)
        return {"$": "box"}

    state: Any = collections.OrderedDict()
    state.note = Box()

    class Named(Box):
        def __repr__(self) -> str:
            return "<named>"

    tree.encode([{Named(): 1}, {Named()}, state, {3: Named()}, slice(Named())], "x", foreign)
    assert seen == ["x[0] key <named>", "x[1]{<named>}", "x[2].note", "x[3][3]", "x[4][1]"]


def test_a_foreign_value_is_written_and_read_by_its_owner() -> None:
    def out(value: object, path: str) -> object:
        assert isinstance(value, Point)
        return {"$": "point", "x": value.x, "y": value.y}

    def back(document: dict[str, object]) -> object:
        assert document["$"] == "point"
        return Point(document["x"], document["y"])  # type: ignore[arg-type]

    value = {"a": [Point(1, 2)], Point(3, 4): {Point(5, 6)}}
    document = json.loads(json.dumps(tree.encode(value, "x", out)))
    assert same(tree.decode(document, back), value)


def test_a_cycle_is_refused_by_its_path() -> None:
    value: dict[str, Any] = {"a": [1, {}]}
    value["a"][1]["self"] = value["a"]
    with pytest.raises(errors.StateError, match=r"^extra\['a'\]\[1\]\['self'\]: contains itself"):
        tree.encode(value, "extra", tree.refuse)
    with pytest.raises(errors.StateError, match="contains itself"):
        tree.copy(value)


def test_a_value_seen_twice_is_no_cycle() -> None:
    shared = [1]
    assert there_and_back([shared, [shared], shared]) == [[1], [[1]], [1]]


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"a": v}])
def test_the_deepest_nesting_allowed_survives_json_and_one_more_is_refused(wrap: Any) -> None:
    value: Any = complex(math.inf, 0)
    for _ in range(tree.MAX_DEPTH):
        value = wrap(value)
    again = there_and_back(value)
    assert json.dumps(tree.encode(again, "x", tree.refuse)) == json.dumps(
        tree.encode(value, "x", tree.refuse)
    )
    with pytest.raises(errors.StateError, match="levels deep"):
        tree.encode(wrap(value), "extra", tree.refuse)


def test_a_foreign_that_never_ends_is_no_recursion_error() -> None:
    def endless(value: object, path: str) -> object:
        return tree.encode(value, path, endless)

    with pytest.raises(errors.StateError, match="levels deep"):
        tree.encode(Box(), "extra", endless)


@pytest.mark.parametrize(
    "document",
    [
        {"$": "os.system", "args": ["true"]},
        {"$": None},
        {"$": ["tuple"]},
        {"$": {}},
        {"$x": 1},
        {1: 2},
        b"bytes",
        pytest.param(object(), id="an object"),
        {"$": "tuple"},
        {"$": "tuple", "items": 3},
        {"$": "tuple", "items": {"a": 1}},
        {"$": "tuple", "items": [], "more": 1},
        {"$": "list", "items": []},
        {"$": "set", "items": [[1]]},
        {"$": "set", "items": [1, 1]},
        {"$": "frozenset", "items": [{"a": 1}]},
        {"$": "dict", "pairs": [[1]]},
        {"$": "dict", "pairs": [[1, 2, 3]]},
        {"$": "dict", "pairs": ["ab"]},
        {"$": "dict", "pairs": [[[], 2]]},
        {"$": "dict", "pairs": [[1, 2], [1, 3]]},
        {"$": "dict", "pairs": {}},
        {"$": "OrderedDict", "pairs": [], "attributes": []},
        {"$": "OrderedDict", "pairs": [], "attributes": {"__class__": 1}},
        {"$": "Counter", "pairs": [], "attributes": {"most_common": 1}},
        {"$": "defaultdict", "factory": "eval", "pairs": []},
        {"$": "defaultdict", "factory": 3, "pairs": []},
        {"$": "defaultdict", "pairs": []},
        {"$": "deque", "items": [], "maxlen": -1},
        {"$": "deque", "items": [], "maxlen": True},
        {"$": "deque", "items": [], "maxlen": 2**100},
        {"$": "deque", "items": [1, 2], "maxlen": 1},
        {"$": "range", "items": [0, 1, 0]},
        {"$": "range", "items": [0, 1]},
        {"$": "range", "items": [0, 1.0, 1]},
        {"$": "range", "items": [True, 1, 1]},
        {"$": "slice", "items": [1]},
        {"$": "complex", "items": [1, 2]},
        {"$": "complex", "items": ["1", 2.0]},
        {"$": "int", "hex": "12"},
        {"$": "int", "hex": "0x_1"},
        {"$": "int", "hex": 12},
        {"$": "float", "hex": "7ff8"},
        {"$": "float", "hex": "zz"},
        {"$": "float", "hex": None},
        {"$": "bytes", "base64": "a"},
        {"$": "bytes", "base64": "é"},
        {"$": "bytes", "base64": "!!!!"},
        {"$": "bytearray", "base64": [1]},
        {"$": "str", "base64": "/w=="},
    ],
    ids=repr,
)
def test_a_hostile_document_is_refused(document: object) -> None:
    for attack in (document, [document], {"a": document}):
        with pytest.raises(errors.CheckpointError):
            tree.decode(attack, tree.refuse_tag)


def test_absurd_nesting_is_refused() -> None:
    listed: Any = []
    tagged: Any = 1
    for _ in range(5000):
        listed = [listed]
        tagged = {"$": "tuple", "items": [tagged]}
    for document in (listed, tagged):
        with pytest.raises(errors.CheckpointError, match="nested too deeply"):
            tree.decode(document, tree.refuse_tag)


def test_a_refusal_of_a_foreign_reader_is_passed_on_as_it_is() -> None:
    def mismatch(document: dict[str, object]) -> object:
        raise errors.MismatchError("another shape")

    with pytest.raises(errors.MismatchError, match="another shape"):
        tree.decode({"$": "tuple", "items": [{"$": "tensor"}]}, mismatch)


# copy


def containers() -> list[Any]:
    return [
        {"a": 1},
        {"a": [1, {"b": {2}}]},
        [1],
        [[1], "a"],
        {1, 2},
        {(1, 2), "a"},
        collections.deque([1, [2]], maxlen=4),
        collections.deque([1], maxlen=4),
        collections.OrderedDict(a=[1]),
        collections.Counter("aab"),
        collections.defaultdict(list, {"a": [1]}),
        bytearray(b"ab"),
        ([1], 2),
        slice(1),
    ]


@pytest.mark.parametrize("index", range(len(containers())))
def test_a_copy_is_equal_and_of_the_same_type(index: int) -> None:
    value = containers()[index]
    result = tree.copy(value)
    assert same(result, value)
    if isinstance(value, collections.deque):
        assert result.maxlen == value.maxlen
    if isinstance(value, collections.defaultdict):
        assert result.default_factory is list


def mutable_parts(value: Any) -> list[Any]:
    """Every container in a value that could be changed later."""
    inner = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple | set | collections.deque)
        else ()
    )
    own = [value] if isinstance(value, dict | list | set | bytearray | collections.deque) else []
    return own + [part for item in inner for part in mutable_parts(item)]


@pytest.mark.parametrize("index", range(len(containers())))
def test_a_copy_shares_nothing_that_can_change(index: int) -> None:
    value = containers()[index]
    result = tree.copy(value)
    assert not {id(part) for part in mutable_parts(value)} & {id(part) for part in mutable_parts(result)}


def test_immutable_containers_of_immutable_leaves_are_not_copied() -> None:
    value = (1, "a", None)
    assert tree.copy(value) is value
    members = frozenset({1, 2})
    assert tree.copy(members) is members


def test_leaves_that_may_change_go_to_the_leaf_function_and_others_are_kept() -> None:
    box = Box()
    taken = []

    def leaf(value: object) -> object:
        taken.append(value)
        return "copied"

    value = {
        "a": box,
        "b": [1, box],
        "c": (box, None),
        "d": {box},
        "e": frozenset({box}),
        "f": collections.deque([box]),
    }
    result = tree.copy(value, leaf)
    assert taken == [box] * 6
    assert (
        result["b"] == [1, "copied"]
        and result["c"] == ("copied", None)
        and result["e"] == frozenset({"copied"})
    )
    assert tree.copy(box, leaf) == "copied"
    assert tree.copy(3, leaf) == 3
    assert tree.copy(value)["b"][1] is box
