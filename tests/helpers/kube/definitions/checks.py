"""What an API server says of an object by a schema: what it would refuse, and what it would drop without a
word.

Rules in CEL are passed over. Those about fields that lastcall writes say that these never change, which
tests/property/test_kube_definitions.py looks at without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_EITHER = "x-kubernetes-int-or-string"
_KEPT = "x-kubernetes-preserve-unknown-fields"
_KEYS = "x-kubernetes-list-map-keys"
BITS = {"int32": 31, "int64": 63}
KNOWN = {
    *(
        "type",
        "properties",
        "items",
        "additionalProperties",
        "required",
        "enum",
        "pattern",
        "format",
        "default",
    ),
    *(
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
    ),
    *("nullable", "x-kubernetes-list-type", _EITHER, _KEPT, _KEYS),
    # these say nothing of one object; `anyOf` stands beside int-or-string only, and says the same
    *("description", "x-kubernetes-map-type", "x-kubernetes-validations", "anyOf"),
}


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema in it, with where it is: `.spec.template`, `[]` for the items of a list, `{}` for the
    values of a map."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], path + mark)


def faults(found: Any, schema: Schema, path: str = "") -> Iterator[str]:
    if found is None and schema.get("nullable"):
        return
    types = (int, str) if schema.get(_EITHER) else _TYPES.get(schema.get("type", ""))
    if types is not None and type(found) not in types:
        yield f"{path}: {type(found).__name__} instead of {schema.get('type', 'a number or a text')}"
    elif isinstance(found, dict):
        yield from _of_object(found, schema, path)
    elif isinstance(found, list):
        yield from _of_list(found, schema, path)
    elif isinstance(found, str):
        yield from _of_text(found, schema, path)
    elif type(found) in (int, float):
        bits = BITS.get(schema.get("format", ""), 64)
        if not max(schema.get("minimum", -(2**bits)), -(2**bits)) <= found < 2**bits:
            yield f"{path}: {found} is too small or too large"
        if found > schema.get("maximum", found):
            yield f"{path}: {found} is too large"


def _counted(number: int, schema: Schema, what: str, path: str) -> Iterator[str]:
    if not schema.get(f"min{what}", 0) <= number <= schema.get(f"max{what}", number):
        yield f"{path}: {number} is no number of {what} that it may have"


def _of_text(found: str, schema: Schema, path: str) -> Iterator[str]:
    yield from _counted(len(found), schema, "Length", path)
    if found not in schema.get("enum", (found,)):
        yield f"{path}: {found!r} is none of {schema['enum']}"
    if not re.search(schema.get("pattern", ""), found):
        yield f"{path}: {found!r} does not match {schema['pattern']}"


def _of_object(found: dict[str, Any], schema: Schema, path: str) -> Iterator[str]:
    yield from _counted(len(found), schema, "Properties", path)
    fields, others = schema.get("properties", {}), schema.get("additionalProperties", False)
    for name in schema.get("required", ()):
        if name not in found and "default" not in fields.get(name, {}):
            yield f"{path}.{name}: missing"
    for name, value in found.items():
        inner = fields.get(name, others)
        if isinstance(inner, dict):
            yield from faults(value, inner, f"{path}.{name}")
        elif not (inner or schema.get(_KEPT)):
            yield f"{path}.{name}: dropped"


def _of_list(found: list[Any], schema: Schema, path: str) -> Iterator[str]:
    yield from _counted(len(found), schema, "Items", path)
    for number, one in enumerate(found):
        yield from faults(one, schema["items"], f"{path}[{number}]")
    if (of := identity(schema)) is not None and len({of(one) for one in found}) < len(found):
        yield f"{path}: two items with the same {schema.get(_KEYS, 'value')}"


def identity(schema: Schema) -> Any:
    """What no two items of a list have in common, as a function of one; None where they may be the same."""
    if schema.get("x-kubernetes-list-type") == "set":
        return str
    if keys := schema.get(_KEYS):
        fields = schema["items"]["properties"]
        return lambda one: tuple(one.get(key, fields[key].get("default")) for key in keys)
    return None
