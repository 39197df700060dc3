from __future__ import annotations

from typing import Any

import pytest

from lastcall.kube.inject.draft import ObjectDraft, ShapeError, applied, pointer


def test_the_recorded_operations_make_the_draft_from_the_object() -> None:
    obj = {"spec": {"env": None, "list": [{"name": "a"}]}}
    draft = ObjectDraft(obj)
    draft.append(("spec", "env"), {"name": "b"})
    draft.append(("spec", "env"), {"name": "c"})
    draft.put(("spec", "list", 0, "value"), "1")
    draft.put(("spec", "list", 0, "value"), "2")
    draft.put(("metadata", "labels", "a/b~c"), "x")
    assert applied(obj, draft.operations) == draft.object
    assert draft.object["spec"]["env"] == [{"name": "b"}, {"name": "c"}]
    assert obj == {"spec": {"env": None, "list": [{"name": "a"}]}}


def test_a_value_that_is_put_in_twice_is_two_values() -> None:
    shared: dict[str, Any] = {"list": []}
    draft = ObjectDraft({})
    draft.put(("a",), shared)
    draft.put(("b",), shared)
    draft.append(("a", "list"), 1)
    assert draft.object["b"] == {"list": []} and shared == {"list": []}


def test_slashes_and_tildes_are_escaped() -> None:
    assert pointer(("a/b", "c~d", 3)) == "/a~1b/c~0d/3"


def test_what_has_another_shape_is_not_replaced() -> None:
    draft = ObjectDraft({"env": "text", "spec": []})
    with pytest.raises(ShapeError, match="/env is not a list"):
        draft.append(("env",), {})
    with pytest.raises(ShapeError, match="/spec is not a mapping"):
        draft.put(("spec", "x"), 1)
    with pytest.raises(ShapeError):
        draft.put(("env", "a", "b"), 1)
    assert draft.operations == []


def test_templates_that_are_one_object_are_changed_each_for_itself() -> None:
    shared: dict[str, object] = {"list": []}
    obj = {"a": shared, "b": shared}
    draft = ObjectDraft(obj)
    draft.append(("a", "list"), 1)
    assert draft.object == applied(obj, draft.operations) == {"a": {"list": [1]}, "b": {"list": []}}
