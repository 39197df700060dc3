"""An object being changed, and the changes as a JSON patch (RFC 6902).

A change is applied and recorded in one call, so a draft reads as the object will be after the patch: a later
change builds on an earlier one. The original object stays unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Path = tuple[str | int, ...]
Object = dict[str, Any]


class ShapeError(TypeError):
    """The object does not have the shape of its kind: it is left unchanged, and the API server reports what
    is wrong."""


class ObjectDraft:
    def __init__(self, obj: Object) -> None:
        self.object: Object = copied(obj)
        self.operations: list[Object] = []

    def get(self, path: Path) -> Any:
        """The value at a path; None if it is missing or null."""
        return at(self.object, path)

    def mapping(self, path: Path) -> Object:
        """The mapping at a path, empty if there is none. Read-only."""
        value = self.get(path)
        return value if isinstance(value, dict) else {}

    def items(self, path: Path) -> list[Any]:
        """The list at a path, empty if there is none. Read-only."""
        return items(self.object, path)

    def named(self, path: Path, name: str) -> int | None:
        """The index of the item of this name in the list; of two variables the later one counts."""
        found = [
            index
            for index, item in enumerate(self.items(path))
            if isinstance(item, dict) and item.get("name") == name
        ]
        return found[-1] if found else None

    def put(self, path: Path, value: Any) -> None:
        """Set a value, creating missing mappings above it. The value is copied: later changes to it are not
        recorded."""
        *above, last = path
        parent = self._made(tuple(above))
        operation = "replace" if last in parent else "add"
        parent[last] = copied(value)
        self._record(operation, path, value)

    def append(self, path: Path, item: Any) -> None:
        """Append to the list at a path, creating it if it is missing."""
        present = self.get(path)
        if present is None:
            self.put(path, [item])
        elif isinstance(present, list):
            present.append(copied(item))
            self._record("add", (*path, "-"), item)
        else:
            raise ShapeError(f"{pointer(path)} is not a list")

    def _made(self, path: Path) -> Any:
        node: Any = self.object
        for depth, key in enumerate(path):
            if isinstance(node, dict) and node.get(key) is None:  # missing, or null
                self.put(path[: depth + 1], {})
            node = at(node, (key,))
        if not isinstance(node, dict):
            raise ShapeError(f"{pointer(path)} is not a mapping")
        return node

    def _record(self, operation: str, path: Path, value: Any) -> None:
        self.operations.append({"op": operation, "path": pointer(path), "value": value})


def copied(value: Any) -> Any:
    """A copy in which no part is shared, unlike copy.deepcopy's: YAML anchors turn two pod templates into one
    mapping."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def at(obj: Any, path: Path) -> Any:
    """The value at this path of an unchecked object; None if there is none."""
    for key in path:
        if isinstance(obj, dict):
            obj = obj.get(key)
        elif isinstance(obj, list) and isinstance(key, int) and 0 <= key < len(obj):
            obj = obj[key]
        else:
            return None
    return obj


def items(obj: Any, path: Path) -> list[Any]:
    """The list at this path of an unchecked object; empty if there is none."""
    value = at(obj, path)
    return value if isinstance(value, list) else []


def pointer(path: Path) -> str:
    return "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in path)


def replayed(obj: Object, operations: Sequence[Object]) -> list[Object]:
    """Some operations of one of our patches, as a patch of their own: mappings created by the omitted
    operations are created again."""
    draft = ObjectDraft(obj)
    for operation in operations:
        *above, last = _path(draft.object, operation["path"])
        if last == "-":
            draft.append(tuple(above), operation["value"])
        else:
            draft.put((*above, last), operation["value"])
    return draft.operations


def _path(obj: Object, text: str) -> Path:
    """Of a pointer into this object."""
    path: Path = ()
    for part in _parts(text):
        path = (*path, int(part) if isinstance(at(obj, path), list) and part != "-" else part)
    return path


def _parts(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def applied(obj: Object, operations: Sequence[Object]) -> Object:
    """The object after a patch of ours: only `add` and `replace` are known."""
    made: Object = copied(obj)
    for operation in operations:
        *above, last = _parts(operation["path"])
        node: Any = made
        for key in above:
            node = node[int(key)] if isinstance(node, list) else node[key]
        if not isinstance(node, list):
            node[last] = copied(operation["value"])
        elif last == "-":
            node.append(copied(operation["value"]))
        else:
            node[int(last)] = copied(operation["value"])
    return made
