from __future__ import annotations

import collections
import json
import pickle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lastcall import errors
from lastcall.formats import tree

hashable_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=0, max_value=6000).map(lambda power: -(7**power))
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]))
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
    | st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
)
leaves = hashable_leaves | st.floats() | st.binary(max_size=20).map(bytearray)
keys: st.SearchStrategy[Any] = st.deferred(
    lambda: hashable_leaves | st.lists(keys, max_size=2).map(tuple) | key_sets  # type: ignore[has-type]
)
key_sets = st.frozensets(keys, max_size=2)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        mappings,
        mappings.map(collections.OrderedDict),
        mappings.map(lambda value: collections.defaultdict(list, value)),
        st.dictionaries(keys, st.integers(), max_size=4).map(collections.Counter),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.lists(inner, max_size=4).map(lambda value: collections.deque(value, maxlen=len(value) + 1)),
        st.builds(slice, inner, inner, inner),
    )


values = st.recursive(leaves, branches, max_leaves=20)

json_documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.fixed_dictionaries(
            {"$": st.sampled_from(sorted(tree._TAG_DECODERS))},
            optional=dict.fromkeys(
                ("items", "pairs", "hex", "base64", "maxlen", "factory", "attributes"), inner
            ),
        )
    ),
    max_leaves=20,
)


def written(value: object) -> str:
    return json.dumps(tree.encode(value, "x", tree.refuse), allow_nan=False)


def fingerprint(value: Any) -> Any:
    """Something that is equal only for values of the same types, order and bits; knows nothing of the
    encoder."""
    if isinstance(value, float | complex):
        return type(value), pickle.dumps(value)
    if isinstance(value, dict):
        extra = value.default_factory if isinstance(value, collections.defaultdict) else None
        return type(value), extra, [(fingerprint(key), fingerprint(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(fingerprint, value)))
    if isinstance(value, collections.deque):
        return type(value), value.maxlen, [fingerprint(item) for item in value]
    if isinstance(value, list | tuple):
        return type(value), [fingerprint(item) for item in value]
    if isinstance(value, slice):
        return slice, fingerprint((value.start, value.stop, value.step))
    if isinstance(value, range):
        return range, fingerprint((value.start, value.stop, value.step))
    return type(value), hex(value) if isinstance(value, int) else value  # hex: repr() refuses 4300 digits


@settings(deadline=None)
@given(values)
def test_every_value_comes_back_with_its_types_order_and_bits(value: object) -> None:
    again = tree.decode(json.loads(written(value)), tree.refuse_tag)
    assert fingerprint(again) == fingerprint(value)


@settings(deadline=None)
@given(values)
def test_what_came_back_is_written_the_same(value: object) -> None:
    text = written(value)
    assert written(tree.decode(json.loads(text), tree.refuse_tag)) == text


@settings(deadline=None)
@given(values)
def test_a_copy_is_the_same_value(value: object) -> None:
    assert fingerprint(tree.copy(value)) == fingerprint(value)


@settings(deadline=None)
@given(json_documents)
def test_any_document_is_a_value_or_a_checkpoint_error(document: object) -> None:
    try:
        value = tree.decode(document, tree.refuse_tag)
    except errors.CheckpointError:
        return
    assert fingerprint(tree.decode(json.loads(written(value)), tree.refuse_tag)) == fingerprint(value)
