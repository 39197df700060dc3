"""What an API server says of an object by a schema: what it would refuse, and what it would drop without a
word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from helpers.kube.definitions.rules import Schema

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def faults(found: Any, schema: Schema, path: str = "") -> Iterator[str]:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(found, bool) or not isinstance(found, (int, str)):
            yield f"{path}: neither a number nor a text"
    elif not isinstance(found, _TYPES[schema["type"]]) or isinstance(found, bool) is not (
        schema["type"] == "boolean"
    ):
        yield f"{path}: not of type {schema['type']}"
        return
    if isinstance(found, dict):
        yield from _of_object(found, schema, path)
    elif isinstance(found, list):
        yield from _of_list(found, schema, path)
    elif "enum" in schema and found not in schema["enum"]:
        yield f"{path}: {found!r} is none of {schema['enum']}"
    elif isinstance(found, str):
        if len(found) > schema.get("maxLength", len(found)) or len(found) < schema.get("minLength", 0):
            yield f"{path}: {len(found)} characters"
        if "pattern" in schema and not re.search(schema["pattern"], found):
            yield f"{path}: {found!r} does not match"
    elif isinstance(found, int) and found < schema.get("minimum", found):
        yield f"{path}: {found} is too small"


def _of_object(found: dict[str, Any], schema: Schema, path: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in found and "default" not in schema["properties"][name]:
            yield f"{path}.{name}: missing"
    for name, value in found.items():
        inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if inner is None:
            yield f"{path}.{name}: dropped"
        else:
            yield from faults(value, inner, f"{path}.{name}")


def _of_list(found: list[Any], schema: Schema, path: str) -> Iterator[str]:
    if not schema.get("minItems", 0) <= len(found) <= schema.get("maxItems", len(found)):
        yield f"{path}: {len(found)} items"
    for number, one in enumerate(found):
        yield from faults(one, schema["items"], f"{path}[{number}]")
    if keys := schema.get("x-kubernetes-list-map-keys"):
        fields = schema["items"]["properties"]
        seen = [tuple(one.get(key, fields[key].get("default")) for key in keys) for one in found]
        if len(set(seen)) < len(seen):
            yield f"{path}: two items with the same {keys}"
